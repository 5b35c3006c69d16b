"""The program that hashes arrays: each host hashes the shards that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from regrow.channel.commands import Digest
from regrow.channel.digests import HASH_BYTES, read_request
from regrow.errors import Code, StatusError
from regrow.head.buffers import Array, Buffers
from regrow.wire import shardings
from regrow.wire.dtypes import kind_of


@final
class Digests:
    """One such program.

    Attributes:
        name: Its name.
        devices: Where its arguments are.
        outputs: Kind, shape and sharding of its result.
    """

    def __init__(self, data: bytes, buffers: Buffers) -> None:
        """Reads a plugin program.

        Raises:
            StatusError: It is none of these, or there are no such devices.
        """
        self.name = "digest"
        self.devices, self._arrays = read_request(data)
        self._buffers = buffers
        self._placement = buffers.placement(self.devices)
        of_shard = (1, self._arrays, HASH_BYTES)
        shape = (len(self.devices), *of_shard[1:])
        sharding = shardings.even(self.devices, None, shape, of_shard, False)
        self.outputs = [(kind_of(np.dtype(np.uint8)), shape, sharding)]

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Has the arrays hashed; nothing is waited for.

        Raises:
            StatusError: The arrays are elsewhere, or one is lost or deleted, or a slice is not there.
        """
        if [array.sharding.devices for array in arrays] != [self.devices] * self._arrays:
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"{self._arrays} arrays on the devices {list(self.devices)} are to be hashed, "
                "and others were given",
            )
        out = self._buffers.new(self._placement)
        sources: dict[int, list[tuple[int, int]]] = {host: [] for host in self._placement.hosts}
        for array in arrays:
            for (buffer, shard), (mine, _) in zip(
                array.pieces(), self._placement.local, strict=True
            ):
                buffer.check_shard(shard)
                sources[mine].append((buffer.aid, buffer.placement.local[shard][1]))
        for host, shards in self._placement.shards.items():
            devices = [self.devices[shard] for shard in shards]
            self._buffers.links[host].send(Digest(out.aid, sources[host], devices))
        return [Array(*self.outputs[0], whole=out)]

    def unload(self) -> None:
        """There is nothing to let go of."""
