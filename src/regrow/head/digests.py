"""The program that hashes arrays, and copies them to host memory: each host does so with its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np

from regrow.channel.commands import Digest
from regrow.channel.digests import COPIES_IN, HASH_BYTES, DigestRequest
from regrow.errors import Code, StatusError
from regrow.head.buffers import Array, Buffers
from regrow.wire import shardings
from regrow.wire.dtypes import kind_of, numpy_dtype
from regrow.wire.shardings import Sharding

Output: TypeAlias = tuple[int, tuple[int, ...], Sharding]


@final
class Digests:
    """One such program.

    Attributes:
        name: Its name.
        devices: Where its arguments are.
        copies: Whether it copies them, too.
        outputs: Kind, shape and sharding of the hashes, and then of each copy.
    """

    def __init__(self, data: bytes, buffers: Buffers) -> None:
        """Reads a plugin program.

        Raises:
            StatusError: It is none of these, or there are no such devices, types or shardings.
        """
        self.name = "digest"
        self.devices, self._arrays, copies = DigestRequest.read(data)
        self._buffers = buffers
        self._placement = buffers.placement(self.devices)
        of_shard = (1, self._arrays, HASH_BYTES)
        shape = (len(self.devices), *of_shard[1:])
        hashes = shardings.even(self.devices, None, shape, of_shard, False)
        self.copies = bool(copies)
        self.outputs: list[Output] = [(kind_of(np.dtype(np.uint8)), shape, hashes)]
        for kind, dims, op_sharding in copies:
            numpy_dtype(kind)
            sharding = shardings.from_op_sharding(self.devices, COPIES_IN, op_sharding)
            self.outputs.append((kind, dims, sharding))

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Has the arrays hashed and copied; nothing is waited for.

        Raises:
            StatusError: The arrays are others, or one is lost or deleted, or a slice is not there.
        """
        self._check(arrays)
        outs = [self._buffers.new(self._placement) for _ in self.outputs]
        sources: dict[int, list[tuple[int, int]]] = {host: [] for host in self._placement.hosts}
        for array in arrays:
            for (buffer, shard), (mine, _) in zip(
                array.pieces(), self._placement.local, strict=True
            ):
                buffer.check_shard(shard)
                sources[mine].append((buffer.aid, buffer.placement.local[shard][1]))
        copies = [out.aid for out in outs[1:]]
        for host, shards in self._placement.shards.items():
            devices = [self.devices[shard] for shard in shards]
            command = Digest(outs[0].aid, sources[host], devices, copies, COPIES_IN)
            self._buffers.links[host].send(command)
        return [Array(*output, whole=out) for output, out in zip(self.outputs, outs, strict=True)]

    def _check(self, arrays: Sequence[Array]) -> None:
        if [array.sharding.devices for array in arrays] != [self.devices] * self._arrays:
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"{self._arrays} arrays on the devices {list(self.devices)} are to be hashed, "
                "and others were given",
            )
        for array, (kind, shape, sharding) in zip(arrays, self.outputs[1:], strict=False):
            same = (array.kind, array.shape) == (kind, shape)
            if not same or not array.sharding.same_tiling(sharding, shape):
                raise StatusError.user(
                    Code.INVALID_ARGUMENT,
                    f"an array of shape {list(array.shape)} is no copy of shape {list(shape)}, "
                    "or is cut otherwise",
                )

    def unload(self) -> None:
        """There is nothing to let go of."""
