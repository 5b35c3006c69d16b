"""The program by which a client asks for the hashes of arrays: a little JSON, as pathwaysutils' own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from regrow.errors import Code, StatusError

HASH_BYTES: Final = 16
_NAME: Final = "regrowDigestRequest"


def request_of(devices: Sequence[int], arrays: int) -> str:
    """The text of a program that hashes so many arrays, each with a shard on each of the devices."""
    return json.dumps({_NAME: {"devices": list(devices), "arrays": arrays}})


def is_request(data: bytes) -> bool:
    """Whether a plugin program is such a one."""
    return _NAME.encode() in data


def read_request(data: bytes) -> tuple[tuple[int, ...], int]:
    """The devices, and how many arrays there are.

    Raises:
        StatusError: It is no such program.
    """
    try:
        told = json.loads(data[data.index(b"{") :])[_NAME]
        devices, arrays = tuple(map(int, told["devices"])), int(told["arrays"])
        if arrays < 1 or not devices or len(set(devices)) != len(devices):
            raise ValueError(arrays)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise StatusError.user(
            Code.INVALID_ARGUMENT, f"a request for hashes that is none: {data[:80]!r}"
        ) from None
    return devices, arrays
