"""Addresses of local hosts: each its own in 127.0.0.0/8, of a block that one server has."""

from __future__ import annotations

import socket
from typing import Final, final

from regrow.errors import ClusterError

METADATA_PORT: Final = 8480
"""Where the metadata server of a host listens, on the host's own address."""

_FIRST: Final = 64
_BLOCKS: Final = 160
_LARGEST: Final = 250 * 256


@final
class AddressBlock:
    """127.B.0.0 to 127.B.249.255, held as long as this object is open.

    Attributes:
        number: B.
    """

    def __init__(self, preferred: int | None = None, *, seed: int = 0) -> None:
        """Takes a block that no other server on this machine has.

        Args:
            preferred: The one that an earlier server of the same state had, if it is free.
            seed: Where the search begins otherwise.

        Raises:
            ClusterError: If none is free.
        """
        candidates = [_FIRST + (seed + index) % _BLOCKS for index in range(_BLOCKS)]
        if preferred is not None:
            candidates.insert(0, preferred)
        for number in candidates:
            holder = socket.socket()
            try:
                # Bound without listening: that alone keeps others away.
                holder.bind((f"127.{number}.255.254", METADATA_PORT))
            except OSError:
                holder.close()
                continue
            self.number = number
            self._holder = holder
            return
        raise ClusterError("no block of loopback addresses is free for the hosts of slices")

    def address(self, host: int) -> str:
        """The address of a host by its number."""
        if not 0 <= host < _LARGEST:
            raise ClusterError(f"a local Cloud TPU has at most {_LARGEST} hosts")
        return f"127.{self.number}.{host // 256}.{host % 256}"

    def __enter__(self) -> AddressBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.close()
