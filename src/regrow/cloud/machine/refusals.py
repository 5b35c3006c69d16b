"""How the control plane refuses what is asked of a resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from regrow.errors import CloudApiError, Code

_Record = TypeVar("_Record")


def found(table: Mapping[str, _Record], name: str) -> _Record:
    """The record of a name.

    Raises:
        CloudApiError: NOT_FOUND.
    """
    record = table.get(name)
    if record is None:
        raise CloudApiError(Code.NOT_FOUND, f"Resource '{name}' was not found")
    return record


def already_exists(name: str) -> CloudApiError:
    """The answer to the creation of what there is already."""
    return CloudApiError(Code.ALREADY_EXISTS, f"Resource '{name}' already exists")


def not_in(name: str, state: str, done: str, wanted: str) -> CloudApiError:
    """The answer to a request that the state of its target does not allow."""
    return CloudApiError(
        Code.FAILED_PRECONDITION,
        f"{name} is {state} and cannot be {done}: it must be {wanted}.",
    )
