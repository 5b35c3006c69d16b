"""Partial responses: what is left of an answer by `fields`, as every Google API has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from regrow.cloud.server.decode import camel, invalid_field

_TOKENS: Final = re.compile(r"\s*([^\s,/()]+|[,/()])")
_DEEPEST: Final = 32

Mask = dict[str, "Mask"]
"""Fields, each with those of its own that are wanted; none: all of it."""


def partial(answer: Any, fields: str) -> Any:
    """An answer with only the fields that are asked for.

    Args:
        answer: JSON.
        fields: Paths, as in "nextPageToken,nodes(name,networkConfig/network)"; "*" is any field.

    Raises:
        CloudApiError: INVALID_ARGUMENT if that is no list of paths.
    """
    return _chosen(answer, parse(fields))


def parse(fields: str) -> Mask:
    """Reads a list of paths.

    Raises:
        CloudApiError: INVALID_ARGUMENT if it is none.
    """
    tokens = _TOKENS.findall(fields)
    if "".join(tokens) != re.sub(r"\s", "", fields):
        raise _wrong(fields)
    mask, rest = _paths(tokens, fields, 0)
    if rest:
        raise _wrong(fields)
    return mask


def _wrong(fields: str) -> Exception:
    return invalid_field("fields", f"Invalid field selection {fields}")


def _paths(tokens: list[str], text: str, depth: int) -> tuple[Mask, list[str]]:
    mask: Mask = {}
    while True:
        name, inner, tokens = _path(tokens, text, depth)
        mask.setdefault(name, {}).update(inner)
        if not tokens or tokens[0] != ",":
            return mask, tokens
        tokens = tokens[1:]


def _path(tokens: list[str], text: str, depth: int) -> tuple[str, Mask, list[str]]:
    if depth > _DEEPEST or not tokens or tokens[0] in ",/()":
        raise _wrong(text)
    name, tokens = tokens[0], tokens[1:]
    # Keys of metadata and types are no fields, and have no other spelling.
    name = camel(name) if re.fullmatch(r"[a-z][a-z0-9_]*", name) else name
    if tokens and tokens[0] == "/":
        inner, deeper, tokens = _path(tokens[1:], text, depth + 1)
        return name, {inner: deeper}, tokens
    if tokens and tokens[0] == "(":
        mask, tokens = _paths(tokens[1:], text, depth + 1)
        if not tokens or tokens[0] != ")":
            raise _wrong(text)
        return name, mask, tokens[1:]
    return name, {}, tokens


def _chosen(value: Any, mask: Mask) -> Any:
    if not mask:
        return value
    if isinstance(value, list):
        return [_chosen(one, mask) for one in value]
    if not isinstance(value, Mapping):
        return value
    every = mask.get("*")
    return {
        name: _chosen(one, mask.get(name, every or {}))
        for name, one in value.items()
        if name in mask or every is not None
    }
