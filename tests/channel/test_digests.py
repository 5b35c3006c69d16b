"""The program that asks for hashes, as text."""

from __future__ import annotations

import pytest

from regrow.channel.digests import is_request, read_request, request_of
from regrow.errors import Code, StatusError


def test_what_is_asked_is_what_is_read() -> None:
    data = b"a prefix:" + request_of([3, 1], 7).encode()
    assert is_request(data)
    assert read_request(data) == ((3, 1), 7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        '{"regrowDigestRequest": 1}',
        '{"regrowDigestRequest": {"devices": [0]}}',
        '{"regrowDigestRequest": {"devices": "x", "arrays": 1}}',
        request_of([], 1),
        request_of([0, 0], 1),
        request_of([0], 0),
    ],
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(StatusError, match="a request for hashes that is none") as caught:
        read_request(text.encode())
    assert caught.value.code is Code.INVALID_ARGUMENT
