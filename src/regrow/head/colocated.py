"""Colocated Python programs: the head passes the user's pickled code on, and never looks into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from google.protobuf.message import DecodeError

from regrow.channel.commands import Execute, SetColocated, Unload
from regrow.errors import Code, StatusError
from regrow.head.buffers import Buffer, Buffers
from regrow.head.links import Link
from regrow.wire import shardings
from regrow.wire.schema import ifrt


@final
class Colocated:
    """One such program.

    Attributes:
        name: The name of its function.
        placement: The devices whose hosts run it.
        outputs: Kind, shape and sharding of each result.
        donated: Numbers of the arguments that it may reuse: none.
    """

    def __init__(self, data: bytes, buffers: Buffers) -> None:
        """Reads a serialised CustomCallProgramProto.

        Raises:
            StatusError: It is none.
        """
        try:
            program = ifrt.CustomCallProgramProto.FromString(data)
        except DecodeError:
            raise StatusError(Code.INVALID_ARGUMENT, "a custom call program that is none") from None
        self.name = str(program.name)
        self.placement = buffers.placement(tuple(program.devices.device_ids))
        self.outputs = [
            (spec.dtype.kind, tuple(spec.shape.dims), shardings.parse(spec.sharding))
            for spec in program.output_specs
        ]
        self.donated: frozenset[int] = frozenset()
        self._buffers = buffers
        self._number = buffers.number()
        self._text = bytes(program.serialized_program_text)
        self._loaded: dict[int, Link] = {}

    def execute(
        self, args: Sequence[Buffer], with_status: bool
    ) -> tuple[list[Buffer], Buffer | None]:
        """Starts one run on each of its hosts.

        Raises:
            SliceLostError: A slice of it is not there.
        """
        buffers = self._buffers
        outs = [buffers.new(buffers.placement(out.devices)) for _, _, out in self.outputs]
        status = buffers.new(self.placement)
        ids = [arg.aid for arg in args], [out.aid for out in outs]
        for host in self.placement.hosts:
            link = buffers.links[host]
            self._load(host, link)
            link.send(Execute(0, self._number, *ids, status.aid))
        return outs, status if with_status else None

    def _load(self, host: int, link: Link) -> None:
        if self._loaded.get(host) is link:
            return
        self._loaded[host] = link
        topology = self._buffers.topology
        link.send(
            SetColocated(
                self._number,
                self._text,
                [(kind, shape, out.devices) for kind, shape, out in self.outputs],
                [topology.devices_of_host(number) for number in range(topology.hosts)],
            )
        )

    def unload(self) -> None:
        """Has all hosts forget it."""
        for link in self._loaded.values():
            if link.lost is None:
                link.send(Unload((self._number,)))
        self._loaded.clear()
