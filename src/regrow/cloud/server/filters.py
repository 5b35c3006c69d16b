"""`filter` of lists, as far as AIP-160 goes without OR: terms that all have to hold."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from regrow.cloud.server.decode import camel, invalid_field

_WORD: Final = r'"(?:[^"\\]|\\.)*"|[^\s()"<>=!:]+'
_TERM: Final = re.compile(
    rf"\s*(?:AND\s+)?(NOT\s+|-)?(?:([\w.@-]+)\s*(<=|>=|!=|=|<|>|:)\s*)?({_WORD})(?=\s|$)"
)
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

Test = Callable[[Mapping[str, Any]], bool]


def parse_filter(text: str) -> Test:
    """What a filter asks of a resource.

    Terms are FIELD=VALUE, FIELD!=VALUE, FIELD<VALUE and the like, FIELD:VALUE (has: a part of a text, an
    element of a list, a key of a map; "*": is there), or a VALUE that any field has as a part; with NOT or
    "-" in front they must not hold.

    Raises:
        CloudApiError: INVALID_ARGUMENT if it is something else.
    """
    terms: list[Test] = []
    at = 0
    while at < len(text.rstrip()):
        match = _TERM.match(text, at)
        if match is None or match[4] in ("OR", "AND", "NOT"):
            raise invalid_field(
                "filter",
                f"Invalid filter {text!r} at {text[at:].strip()[:40]!r}: give terms like "
                "name:v4, joined by AND; OR and parentheses are not served.",
            )
        terms.append(_term(bool(match[1]), match[2] or "", match[3] or "", _unquoted(match[4])))
        at = match.end()
    return lambda item: all(term(item) for term in terms)


def _unquoted(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word[1:-1]) if word.startswith('"') else word


def _term(negated: bool, path: str, sign: str, wanted: str) -> Test:
    parts = [
        camel(part) if re.fullmatch(r"[a-z][a-z0-9_]*", part) else part for part in path.split(".")
    ]

    def holds(item: Mapping[str, Any]) -> bool:
        value = _at(item, parts) if path else item
        return _matches(value, sign or ":", wanted) != negated

    return holds


def _at(value: Any, path: list[str]) -> Any:
    for part in path:
        if isinstance(value, list):
            value = [found for one in value if (found := _at(one, [part])) is not None]
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _matches(value: Any, sign: str, wanted: str) -> bool:
    if sign == "!=":
        return not _matches(value, "=", wanted)
    if value is None:
        return False
    if isinstance(value, list):
        return any(_matches(one, sign, wanted) for one in value) or (sign == ":" and wanted == "*")
    if isinstance(value, Mapping):
        return sign == ":" and (
            wanted == "*"
            or wanted in value
            or any(_matches(one, sign, wanted) for one in value.values())
        )
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    if sign == ":":
        return wanted == "*" or wanted.lower() in shown.lower()
    if sign == "=":
        return shown == wanted
    compare = _COMPARISONS[sign]
    try:
        return compare(float(shown), float(wanted))
    except ValueError:
        return compare(shown, wanted)
