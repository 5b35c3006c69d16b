"""Events and instructions as JSON objects: `{"kind": "SliceIdle", "index": 0, "incarnation": 3}`."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

from regrow.errors import UsageError
from regrow.jobs import model
from regrow.jobs.model import Event, Instruction

_T = TypeVar("_T")
_EVENTS: Final = {kind.__name__: kind for kind in get_args(Event)}


def encode(value: Event | Instruction) -> dict[str, Any]:
    """The JSON object of an event or instruction."""
    return {"kind": type(value).__name__} | dataclasses.asdict(value)


def decode_event(message: Mapping[str, Any]) -> Event:
    """The event that a peer has sent.

    Raises:
        UsageError: If it is none, or one of its fields is missing, unknown or of a wrong type.
    """
    fields = dict(message)
    kind = _EVENTS.get(str(fields.pop("kind", None)))
    if kind is None:
        raise UsageError(f"{message.get('kind')!r} is no event")
    return typing.cast("Event", build(kind, fields))


def build(kind: type[_T], fields: object) -> _T:
    """A dataclass of `regrow.jobs.model` from a peer's JSON.

    Raises:
        UsageError: If a field is missing, unknown or of a wrong type.
    """
    if not isinstance(fields, Mapping):
        raise UsageError(f"a {kind.__name__} is no JSON object")
    hints = _hints(typing.cast("Any", kind))
    unknown = sorted(str(name) for name in fields.keys() - hints.keys())
    if unknown:
        raise UsageError(f"a {kind.__name__} has no field {', '.join(unknown)}")
    values = {name: _value(hints[name], fields[name], kind, name) for name in fields}
    try:
        return kind(**values)
    except TypeError:
        missing = sorted(hints.keys() - fields.keys())
        raise UsageError(f"a {kind.__name__} lacks one of: {', '.join(missing)}") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, vars(model))


def _value(hint: Any, value: object, kind: type, name: str) -> Any:
    origin = get_origin(hint)
    if origin is types.UnionType:
        if value is None:
            return None
        (hint,) = (one for one in get_args(hint) if one is not types.NoneType)
        return _value(hint, value, kind, name)
    if origin is tuple and isinstance(value, list | tuple):
        return _tuple(get_args(hint), value, kind, name)
    if origin is Literal and value in get_args(hint):
        return value
    if dataclasses.is_dataclass(hint):
        return build(typing.cast("type[Any]", hint), value)
    # bool is an int to Python, and not to us.
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise UsageError(f"{name} of a {kind.__name__} cannot be {value!r}")


def _tuple(parts: tuple[Any, ...], value: Any, kind: type, name: str) -> tuple[Any, ...]:
    if parts[-1] is Ellipsis:
        parts = (parts[0],) * len(value)
    if len(parts) != len(value):
        raise UsageError(f"{name} of a {kind.__name__} cannot be {value!r}")
    return tuple(_value(*pair, kind, name) for pair in zip(parts, value, strict=True))
