"""JSON from a client to the API's own form: camelCase, names for enums, no unknown fields.

As Google's servers do (the JSON mapping of protocol buffers), it takes snake_case as well, enums by
name or number, 64-bit numbers as text, and null for what is not set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from regrow.cloud.server.schema import ENUMS, MESSAGES, Field
from regrow.cloud.times import parse_duration, parse_time
from regrow.errors import CloudApiError, Code

_SNAKE: Final = re.compile(r"_([a-z0-9])")


def camel(name: str) -> str:
    """`queued_resource_id` as `queuedResourceId`; a name in camelCase stays as it is."""
    return _SNAKE.sub(lambda match: match.group(1).upper(), name)


def invalid_field(where: str, text: str) -> CloudApiError:
    """The answer to a field that is wrong, in the form that Google's clients know."""
    violation = {"field": where, "description": text}
    details = [
        {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}
    ]
    return CloudApiError(Code.INVALID_ARGUMENT, text, details)


def parse_body(text: bytes, message: str) -> dict[str, Any]:
    """Reads the body of a request; an empty one is an empty message.

    Raises:
        CloudApiError: INVALID_ARGUMENT, with the path of the field.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CloudApiError(
            Code.INVALID_ARGUMENT, f"Invalid JSON payload received. {error}"
        ) from None
    return decode(value, message, "")


def decode(value: Any, message: str, where: str) -> dict[str, Any]:
    """Checks a message and brings it into the API's own form."""
    if not isinstance(value, dict):
        raise invalid_field(where, f"Invalid value at '{where}' ({message}): an object is wanted.")
    fields = MESSAGES[message]
    result: dict[str, Any] = {}
    for key, given in value.items():
        name = camel(key)
        path = f"{where}.{key}" if where else key
        field = fields.get(name)
        if field is None:
            at = f" at '{where}'" if where else ""
            raise invalid_field(
                path, f'Invalid JSON payload received. Unknown name "{key}"{at}: Cannot find field.'
            )
        if name in result:
            raise invalid_field(path, f"Invalid JSON payload received. '{path}' is given twice.")
        if given is not None and not field.output:
            result[name] = _field(given, field, path)
    return result


def _field(value: Any, field: Field, where: str) -> Any:
    if not field.repeated:
        return _single(value, field.type, where)
    if not isinstance(value, list):
        raise invalid_field(where, f"Invalid value at '{where}': a list is wanted.")
    return [_single(one, field.type, f"{where}[{index}]") for index, one in enumerate(value)]


def _single(value: Any, kind: str, where: str) -> Any:
    if kind in MESSAGES:
        return decode(value, kind, where)
    if kind in ENUMS:
        return _enum(value, kind, where)
    return _SCALARS[kind](value, where)


def _enum(value: Any, kind: str, where: str) -> str:
    names = ENUMS[kind]
    if isinstance(value, str) and value in names:
        return value
    if type(value) is int:
        for name, number in names.items():
            if number == value:
                return name
    raise invalid_field(
        where, f"Invalid value at '{where}' (TYPE_ENUM), {json.dumps(value)}: {', '.join(names)}."
    )


def _wrong(where: str, kind: str, value: Any) -> CloudApiError:
    told = json.dumps(value)
    return invalid_field(where, f"Invalid value at '{where}' ({kind}), {told[:200]}")


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "TYPE_STRING", value)
    return value


def _bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, "TYPE_BOOL", value)
    return value


def _integer(bits: int) -> Callable[[Any, str], int]:
    def read(value: Any, where: str) -> int:
        number = value
        if (isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value)) or (
            isinstance(value, float) and value.is_integer()
        ):
            number = int(value)
        if type(number) is not int or not -(2**bits) <= number < 2**bits:
            raise _wrong(where, f"TYPE_INT{bits + 1}", value)
        return number

    return read


def _checked(check: Callable[[str], float], kind: str) -> Callable[[Any, str], str]:
    def read(value: Any, where: str) -> str:
        try:
            check(_string(value, where))
        except (ValueError, OverflowError):
            raise _wrong(where, kind, value) from None
        text: str = value
        return text

    return read


def _map(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(where, "a map of strings", value)
    return {key: _string(one, f"{where}.{key}") for key, one in value.items()}


_SCALARS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "string": _string,
    "bool": _bool,
    "int32": _integer(31),
    "int64": _integer(63),
    "duration": _checked(parse_duration, "type.googleapis.com/google.protobuf.Duration"),
    "time": _checked(parse_time, "type.googleapis.com/google.protobuf.Timestamp"),
    "map": _map,
}

# Parameters that every method of a Google API takes.
STANDARD: Final = frozenset(
    [
        "$.xgafv",
        "$alt",
        "access_token",
        "alt",
        "callback",
        "fields",
        "key",
        "oauth_token",
        "prettyPrint",
        "quotaUser",
        "upload_protocol",
        "uploadType",
    ]
)


def parse_query(pairs: Iterable[tuple[str, str]], allowed: Iterable[str]) -> dict[str, str]:
    """Reads query parameters in either spelling.

    Raises:
        CloudApiError: INVALID_ARGUMENT if one is unknown.
    """
    known = {*allowed}
    query: dict[str, str] = {}
    for key, value in pairs:
        name = key if key in STANDARD else camel(key)
        if name not in known and name not in STANDARD:
            raise invalid_field(
                key,
                f'Invalid JSON payload received. Unknown name "{key}": Cannot bind query parameter. '
                f"Field '{key}' could not be found in request message.",
            )
        query[name] = value
    if query.get("alt", "json") != "json" or query.get("$alt", "json").split(";")[0] != "json":
        raise invalid_field("alt", "Only alt=json is served.")
    return query


def boolean(query: Mapping[str, str], name: str) -> bool:
    """A boolean parameter; absent: false."""
    text = query.get(name, "false")
    if text.lower() not in ("true", "false", "1", "0"):
        raise invalid_field(name, f"Invalid value at '{name}' (TYPE_BOOL), {json.dumps(text)}")
    return text.lower() in ("true", "1")
