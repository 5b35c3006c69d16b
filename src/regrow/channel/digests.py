"""The program by which a client has arrays hashed, and copied meanwhile: JSON, as pathwaysutils' own."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from regrow.errors import Code, StatusError

HASH_BYTES: Final = 16
COPIES_IN: Final = "pinned_host"
_NAME: Final = "regrowDigestRequest"


class CopySpec(NamedTuple):
    """A copy that is wanted: element type (see `wire.dtypes`), shape, and how XLA says it is cut."""

    kind: int
    shape: tuple[int, ...]
    op_sharding: bytes


class DigestRequest(NamedTuple):
    """Hash so many arrays, each with a shard on each of the devices; what is copied, are all of them."""

    devices: tuple[int, ...]
    arrays: int
    copies: tuple[CopySpec, ...] = ()

    def text(self) -> str:
        """As the client sends it."""
        copies = [
            [kind, shape, base64.b64encode(op_sharding).decode()]
            for kind, shape, op_sharding in self.copies
        ]
        told = {"devices": self.devices, "arrays": self.arrays, "copies": copies}
        return json.dumps({_NAME: told})

    @classmethod
    def read(cls, data: bytes) -> DigestRequest:
        """Reads a plugin program.

        Raises:
            StatusError: It is no such request.
        """
        try:
            told = json.loads(data[data.index(b"{") :])[_NAME]
            devices, arrays = _numbers(told["devices"]), int(told["arrays"])
            copies = tuple(
                CopySpec(int(kind), _numbers(shape), base64.b64decode(op_sharding, validate=True))
                for kind, shape, op_sharding in told["copies"]
            )
            if len(set(devices)) != max(1, len(devices)) or len(copies) not in (0, arrays):
                raise ValueError(told)
            if arrays < 1 or any(min(copy.shape, default=0) < 0 for copy in copies):
                raise ValueError(told)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise StatusError.user(
                Code.INVALID_ARGUMENT, f"a request for hashes that is none: {data[:80]!r}"
            ) from None
        return cls(devices, arrays, copies)


def is_request(data: bytes) -> bool:
    """Whether a plugin program is a `DigestRequest`."""
    return _NAME.encode() in data


def _numbers(told: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, told))
