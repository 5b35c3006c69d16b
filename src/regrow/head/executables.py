"""Programs that a client has compiled, and how one execution of them reaches the hosts."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

from regrow.channel.commands import Execute, Load, Unload, pack
from regrow.errors import Code, StatusError
from regrow.head.buffers import Buffer, Buffers, Placement
from regrow.head.callbacks import CallbackUse
from regrow.head.compile import Compiled
from regrow.head.epochs import Epochs
from regrow.head.links import Link
from regrow.observe import Program
from regrow.wire import shardings
from regrow.wire.shardings import Sharding

Output: TypeAlias = "tuple[int, tuple[int, ...], Sharding]"

_DEFAULT_MEMORY: Final = "device"
_RECENT: Final = 64
# A host loads in its turn what it is given: more would keep it from what the client wants first.
_PRELOADED: Final = 4


@final
class Executable:
    """One compiled program on a sequence of devices.

    Attributes:
        name: Its name.
        compiled: What the compiler told of it, and its blob.
        placement: Its devices, in the order of the assignment.
        outputs: Kind, shape and sharding of each result.
        donated: Numbers of the arguments that it may reuse.
        known: What the observer knows of it.
        closed: It was deleted: no host has it any more.
    """

    def __init__(
        self,
        number: int,
        compiled: Compiled,
        options: bytes,
        placement: Placement,
        replicas: int,
        program: bytes,
        use: CallbackUse | None = None,
    ) -> None:
        """Takes what the compiler told; `program` is empty unless hosts must compile it themselves."""
        self.number = number
        self.name: str = compiled["name"]
        self.compiled = compiled
        self.options = options
        self.placement = placement
        self.donated = frozenset(compiled["donated"])
        self.outputs = _outputs(compiled, placement.devices)
        self.known: Program | None = None
        self._replicas = replicas
        self._program = program
        self._use = use
        self._loaded: dict[int, tuple[Link, int]] = {}
        self.closed = False

    def load(self, host: int, link: Link, epoch: int) -> None:
        """Has it loaded on a host, if it is not there already for this epoch."""
        if self.closed or self._loaded.get(host) == (link, epoch):
            return
        self._loaded[host] = (link, epoch)
        if self._use is not None:
            self._use.loaded_on(link)
        link.send(
            Load(
                self.number,
                self.name,
                b"" if self._program else self.compiled["blob"],
                self._program,
                self.options,
                self.placement.devices,
                self._replicas,
                [(kind, tuple(dims)) for kind, dims in self.compiled["outputs"]],
                epoch,
            )
        )

    def unload(self) -> None:
        """Has all hosts forget it."""
        for link, _ in self._loaded.values():
            if link.lost is None:
                link.send(Unload((self.number,)))
        self._loaded.clear()
        self.closed = True
        if self._use is not None:
            self._use.close()


def _outputs(compiled: Compiled, devices: tuple[int, ...]) -> list[Output]:
    kinds = compiled["memory_kinds"][0] if compiled["memory_kinds"] else ()
    given = compiled["output_shardings"]
    outputs = []
    for index, (kind, dims) in enumerate(compiled["outputs"]):
        shape = tuple(dims)
        memory_kind = kinds[index] if index < len(kinds) else _DEFAULT_MEMORY
        if len(devices) == 1:
            sharding = shardings.single_device(devices[0], memory_kind)
        elif given is not None:
            sharding = shardings.from_op_sharding(devices, memory_kind, given[index])
        else:
            sharding = shardings.even(devices, memory_kind, shape, shape, False)
        outputs.append((kind, shape, sharding))
    return outputs


@final
class Dispatcher:
    """Sends executions to the hosts, in one order for all: collectives never wait crosswise."""

    def __init__(self, buffers: Buffers, epochs: Epochs) -> None:
        self._buffers = buffers
        self._epochs = epochs
        self._launch = 0
        self._recent: OrderedDict[int, weakref.ref[Executable]] = OrderedDict()

    def preload(self, executable: Executable) -> None:
        """Has a program loaded ahead of its first execution, where its hosts are up.

        One for a part of the present epoch's hosts is there for the time after a loss, most likely:
        to load it now would hold up what runs, and be in vain, for then there is another epoch.
        """
        placement, links = executable.placement, self._buffers.links
        if not all(host in links for host in placement.hosts):
            return
        if placement.spans and self._epochs.is_larger_than(placement.hosts):
            return
        epoch = self._epochs.covering(placement.hosts) if placement.spans else 0
        for host in placement.hosts:
            executable.load(host, links[host], epoch)

    def preload_recent(self, slice_index: int) -> None:
        """Has the programs that were last run over a slice loaded, now that it is back.

        It is done while the client is busy with its arrays, so that its first step finds them there.
        """
        recent = (reference() for reference in reversed(self._recent.values()))
        fitting = (one for one in recent if one is not None and slice_index in one.placement.slices)
        for executable in itertools.islice(fitting, _PRELOADED):
            self.preload(executable)

    def _note(self, executable: Executable) -> None:
        self._recent[executable.number] = weakref.ref(executable)
        self._recent.move_to_end(executable.number)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    def execute(
        self, executable: Executable, args: Sequence[Buffer], with_status: bool
    ) -> tuple[list[Buffer], Buffer | None]:
        """Starts one execution: a buffer for each result, and one that stands for its end.

        Raises:
            SliceLostError: A slice of it is not there.
            StatusError: An argument is on other devices, or the program was deleted.
        """
        if executable.closed:
            raise StatusError.user(
                Code.INVALID_ARGUMENT,
                f"the program {executable.name} was deleted; compile it again",
            )
        placement, buffers = executable.placement, self._buffers
        buffers.check_live(placement)
        for index, arg in enumerate(args):
            if arg.placement is not placement:
                raise _misplaced(executable, index, arg)
        epoch = self._epochs.covering(placement.hosts) if placement.spans else 0
        links = buffers.links
        for host in placement.hosts:
            executable.load(host, links[host], epoch)
        self._launch += 1
        self._note(executable)
        outs = [buffers.new(placement) for _ in executable.outputs]
        status = buffers.new(placement) if with_status else None
        packed = pack(
            Execute(
                self._launch,
                executable.number,
                [arg.aid for arg in args],
                [out.aid for out in outs],
                0 if status is None else status.aid,
            )
        )
        for host in placement.hosts:
            links[host].post(packed)
        return outs, status


def _misplaced(executable: Executable, index: int, arg: Buffer) -> StatusError:
    return StatusError.user(
        Code.INVALID_ARGUMENT,
        f"argument {index} of {executable.name} is on devices {list(arg.placement.devices)}; the "
        f"program runs on {list(executable.placement.devices)}",
    )


def memory_stats(compiled: Compiled, message: Any) -> None:
    """Writes the memory statistics of a program into a CompiledMemoryStatsProto."""
    message.SetInParent()
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in (compiled["memory"] or {}).items():
        if name in fields:
            setattr(message, name, value)
