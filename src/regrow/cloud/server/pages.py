"""Lists in pages: a token names the last item that was given, so that nothing shifts a page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final

from regrow.cloud.server.decode import invalid_field

_DEFAULT_SIZE: Final = 500
_LARGEST_SIZE: Final = 1000


def page(
    items: Sequence[tuple[int, Any]], query: Mapping[str, str]
) -> tuple[list[Any], dict[str, str]]:
    """The page of some items that a query asks for.

    Args:
        items: Each with a number by which they are ordered.
        query: `pageSize` and `pageToken` are read from it.

    Returns:
        The items, and `nextPageToken` if there are more.

    Raises:
        CloudApiError: INVALID_ARGUMENT.
    """
    size = _size(query.get("pageSize", "0"))
    after = _after(query.get("pageToken", ""))
    rest = sorted((item for item in items if item[0] > after), key=lambda item: item[0])
    taken = rest[:size]
    more = {"nextPageToken": _token(taken[-1][0])} if len(rest) > size else {}
    return [value for _, value in taken], more


def _size(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise invalid_field("pageSize", f"Invalid value at 'page_size' (TYPE_INT32), {text!r}")
    return min(int(text) or _DEFAULT_SIZE, _LARGEST_SIZE)


def _token(number: int) -> str:
    return base64.urlsafe_b64encode(f"after:{number}".encode()).decode().rstrip("=")


def _after(token: str) -> int:
    if not token:
        return -1
    try:
        padded = token + "=" * (-len(token) % 4)
        word, _, number = base64.b64decode(padded, b"-_", validate=True).decode().partition(":")
        if word != "after":
            raise ValueError(word)
        return int(number)
    except (ValueError, binascii.Error):
        raise invalid_field(
            "pageToken", "The page token is none that this server has given."
        ) from None
