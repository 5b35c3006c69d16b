"""A head without processes: its parts are real, its hosts are models that carry out commands in numpy.

def test_something() -> None:
    async def main(world: World) -> None:
        buffer = world.runtime.transfers.put(...)
        await world.settle()            # hosts carry out what they were told, answers arrive
    run(main, slices=2)
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from regrow.channel import commands as c
from regrow.channel.arena import ArenaView
from regrow.channel.digests import HASH_BYTES
from regrow.config import HeadConfig
from regrow.errors import Code, SliceLostError, StatusError
from regrow.head.gateway import Gateway
from regrow.head.links import Link
from regrow.head.runtime import Runtime
from regrow.head.session import Session
from regrow.head.topology import MEMORY_KINDS, Topology
from regrow.wire import schema, shardings
from regrow.wire.dtypes import STRING, TOKEN, numpy_dtype
from regrow.wire.schema import proxy
from regrow.wire.shardings import Sharding

WAIT_S = 30.0
F32 = 11


class Recorder:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.closed = False

    def send(self, payload: Any) -> None:
        data = payload if isinstance(payload, bytes) else b"".join(payload)
        assert data
        self.payloads.append(data)

    def close(self) -> None:
        self.closed = True

    @property
    def commands(self) -> list[Any]:
        """All that was sent, unpacked."""
        return [command for payload in self.payloads for command in c.unpack(payload)]

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kinds)]


class Peer:
    """The other end of a link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.channel = Recorder()
        self._taken = 0
        link.attach(self.channel)

    @property
    def idle(self) -> bool:
        return self._taken == len(self.channel.payloads)

    def next(self) -> list[Any]:
        self._taken += 1
        return c.unpack(self.channel.payloads[self._taken - 1])


class Cell:
    """One shard: a value, an error, or neither yet."""

    def __init__(self, value: Any = None, error: StatusError | None = None) -> None:
        self.value = value
        self.error = error
        self._waiting: list[Callable[[Cell], None]] = []

    @property
    def done(self) -> bool:
        return self.value is not None or self.error is not None

    def then(self, use: Callable[[Cell], None]) -> None:
        if self.done:
            use(self)
        else:
            self._waiting.append(use)

    def settle(self, value: Any, error: StatusError | None = None) -> None:
        if self.done:
            return
        self.value, self.error = value, error
        waiting, self._waiting = self._waiting, []
        for use in waiting:
            use(self)


class ModelHost(Peer):
    """A host of a slice, in numpy. It asserts that the head only asks for what makes sense.

    `keeps_leases`: arrays live in the head's memory, so that leases end when their part is freed.
    """

    def __init__(self, world: World, link: Link) -> None:
        super().__init__(link)
        self.world = world
        self.devices = world.topology.devices_of_host(link.host)
        self.parts: dict[int, list[Cell]] = {}
        self.loads: dict[int, c.Load] = {}
        self.leases: dict[int, list[int]] = {}
        self.epochs: list[Any] = []
        self.traces: list[Any] = []
        self.answers_pings = True
        self.keeps_leases = False
        self.expected: dict[int, c.Expect] = {}
        self._memory = ArenaView()

    def step(self) -> None:
        for command in self.next():
            getattr(self, f"_{type(command).__name__.lower()}")(command)

    def report(self, command: Any) -> None:
        (again,) = c.unpack(c.pack(command))
        if self.link.lost is None:
            self.world.runtime.report(self.link, again)

    def view(self, bulk: Any) -> Any:
        return bulk if isinstance(bulk, bytes) else self._memory.view(bulk)

    def _segment(self, command: c.Segment) -> None:
        if command.path:
            self._memory.open(command.segment, command.path, command.size)
        else:
            self._memory.forget(command.segment)

    def _put(self, command: c.Put) -> None:
        assert command.memory_kind
        assert command.aid not in self.parts
        buffer = self.view(command.bulk)
        for device, *_ in command.shards:
            assert device in self.devices
        cells = [self._placed(command.kind, buffer, *shard[1:]) for shard in command.shards]
        self.parts[command.aid] = cells
        if command.lease:
            if self.keeps_leases and command.keep:
                self.leases.setdefault(command.aid, []).append(command.lease)
            else:
                self.report(c.Released((command.lease,)))

    def _placed(self, kind: int, buffer: Any, offset: int, dims: Any, strides: Any) -> Cell:
        try:
            if kind == TOKEN:
                return Cell(np.zeros(dims, bool))
            if kind == STRING:
                return Cell(np.frombuffer(buffer, np.uint8).copy())
            value: Any = np.ndarray(dims, numpy_dtype(kind), buffer, offset, strides)
            return Cell(value.copy())
        except (ValueError, TypeError, MemoryError, StatusError) as error:
            return Cell(error=StatusError.user(Code.INVALID_ARGUMENT, str(error)))

    def _take(self, command: c.Take) -> None:
        assert command.aid not in self.parts
        self.parts[command.aid] = [self.parts[aid][shard] for aid, shard in command.sources]

    def _copy(self, command: c.Copy) -> None:
        cells = []
        for (aid, shard), device in zip(command.sources, command.devices, strict=True):
            assert device in self.devices
            cell = Cell()
            if command.memory_kind not in MEMORY_KINDS:
                cell.settle(None, StatusError.user(Code.INVALID_ARGUMENT, "no such memory"))
            self.parts[aid][shard].then(lambda s, to=cell: to.settle(s.value, s.error))
            cells.append(cell)
        self.parts[command.aid] = cells

    def _digest(self, command: c.Digest) -> None:
        assert set(command.devices) <= set(self.devices)
        count = len(command.devices)
        assert command.sources
        assert len(command.sources) % count == 0
        hashes = np.zeros((1, len(command.sources) // count, HASH_BYTES), np.uint8)
        for aid in (command.aid, *command.copies):
            self.parts[aid] = [Cell() for _ in command.devices]
        for number, (aid, shard) in enumerate(command.sources):
            array, place = divmod(number, count)
            results = [(self.parts[command.aid][place], hashes)]
            if command.copies:
                results.append((self.parts[command.copies[array]][place], None))
            for cell, value in results:
                self.parts[aid][shard].then(
                    lambda s, to=cell, made=value: to.settle(
                        None if s.error else s.value if made is None else made, s.error
                    )
                )

    def _expect(self, command: c.Expect) -> None:
        assert set(command.devices) <= set(self.devices)
        self.expected[command.aid] = command
        self.parts[command.aid] = [Cell() for _ in command.devices]

    def _fill(self, command: c.Fill) -> None:
        expect = self.expected[command.aid]
        dtype = numpy_dtype(expect.kind)
        dims = tuple(command.dims)
        cell = self.parts[command.aid][command.shard]
        try:
            value: Any = np.ndarray(dims, dtype, self.view(command.bulk)).copy()
            cell.settle(value)
        except (ValueError, TypeError) as error:
            cell.settle(None, StatusError.user(Code.INVALID_ARGUMENT, str(error)))
        if command.lease:
            self.report(c.Released((command.lease,)))

    def _fillerror(self, command: c.FillError) -> None:
        for cell in self.parts[command.aid]:
            cell.settle(None, StatusError(Code(command.code), command.message))

    def _get(self, command: c.Get) -> None:
        def answer(cell: Cell) -> None:
            try:
                if cell.error is not None:
                    raise cell.error
                value = cell.value
                if command.region is not None:
                    value = value[tuple(slice(*part) for part in command.region)]
                self.report(c.Reply(command.rid, self._out(value, command)))
            except StatusError as error:
                self.report(c.Failed(command.rid, int(error.code), error.message, 0))
            except (ValueError, TypeError, IndexError) as error:
                self.report(c.Failed(command.rid, 3, str(error), 0))

        self.parts[command.aid][command.shard].then(answer)

    def _out(self, value: Any, command: c.Get) -> bytes | None:
        strides = command.strides
        if command.bulk is not None:
            buffer = self.view(command.bulk)
        elif strides is None:
            return bytes(value.tobytes())
        else:
            pairs = zip(value.shape, strides, strict=True)
            buffer = bytearray(sum((dim - 1) * stride for dim, stride in pairs) + value.itemsize)
        if value.size:
            np.ndarray(value.shape, value.dtype, buffer, 0, strides)[...] = value
        return bytes(buffer) if command.bulk is None else None

    def _ready(self, command: c.Ready) -> None:
        cells = [cell for aid in command.aids for cell in self.parts[aid]]
        left = len(cells)

        def one(_: Cell) -> None:
            nonlocal left
            left -= 1
            if left > 0:
                return
            errors = [cell.error for cell in cells if cell.error is not None]
            if errors:
                self.report(c.Failed(command.rid, int(errors[0].code), errors[0].message, 0))
            else:
                self.report(c.Reply(command.rid, None))

        if not cells:
            self.report(c.Reply(command.rid, None))
        for cell in cells:
            cell.then(one)

    def _free(self, command: c.Free) -> None:
        for aid in command.aids:
            # What was refused before it was sent is freed as well.
            self.parts.pop(aid, None)
            self.expected.pop(aid, None)
            leases = self.leases.pop(aid, ())
            if leases:
                self.report(c.Released(leases))

    def _load(self, command: c.Load) -> None:
        self.loads[command.exe] = command

    def _setcolocated(self, command: Any) -> None:
        self.loads[command.exe] = command

    def _starttrace(self, command: c.StartTrace) -> None:
        self.traces.append(command)
        self.report(c.Reply(command.rid, None))

    def _stoptrace(self, command: c.StopTrace) -> None:
        self.traces.append(command)
        if command.directory == "/full":
            self.report(c.Failed(command.rid, int(Code.FAILED_PRECONDITION), "no room", 0))
        else:
            self.report(c.Reply(command.rid, None))

    def _unload(self, command: c.Unload) -> None:
        for exe in command.exes:
            del self.loads[exe]

    def _execute(self, command: c.Execute) -> None:
        load = self.loads[command.exe]
        everywhere = getattr(load, "devices", ())
        args = [self.parts[aid] for aid in command.args]
        outs = [
            [Cell() for device in (place[0] if place else everywhere) if device in self.devices]
            for _, _, *place in load.outs
        ]
        status = [Cell() for device in everywhere if device in self.devices] or [Cell()]
        for aid, cells in zip(command.outs, outs, strict=True):
            self.parts[aid] = cells
        if command.status:
            self.parts[command.status] = status
        self.world.executed.append((self.link.host, command))
        inputs = [cell for part in args for cell in part]
        left = len(inputs) + 1

        def one(_: Cell | None) -> None:
            nonlocal left
            left -= 1
            if left:
                return
            error = next((cell.error for cell in inputs if cell.error is not None), None)
            for (kind, dims, *_), cells in zip(load.outs, outs, strict=True):
                for cell in cells:
                    if error is None:
                        cell.settle(np.zeros(dims, numpy_dtype(kind)))
                    cell.settle(None, error)
            for cell in status:
                cell.settle(None if error else np.zeros(()), error)

        for cell in inputs:
            cell.then(one)
        one(None)

    def _formepoch(self, command: c.FormEpoch) -> None:
        self.epochs.append(command)
        self.report(c.EpochFormed(command.epoch, 1000 + self.link.host))

    def _failepoch(self, command: c.FailEpoch) -> None:
        self.epochs.append(command)

    def _adopt(self, command: c.Adopt) -> None:
        self.epochs.append(command)

    def _ping(self, command: c.Ping) -> None:
        if self.answers_pings:
            self.report(c.Pong(command.number, 0))


class Helper(Peer):
    """The compiler; to it each program is what its bytes are."""

    def __init__(self, name: str, answer: Callable[[Any], Any]) -> None:
        super().__init__(Link(name))
        self._answer = answer

    def step(self) -> None:
        for command in self.next():
            is_question = isinstance(command, c.Identify)
            answer = command.program if is_question else self._answer(command)
            if isinstance(answer, StatusError):
                self.link.answered(command.rid, answer, None)
            elif answer is not None:
                self.link.answered(command.rid, None, answer)


class Role:
    """What `Aide` is to its users: the link of the process that is there now, if any."""

    def __init__(self) -> None:
        self.link: Link | None = None


class World:
    """A head with model hosts; all slices are up."""

    def __init__(
        self,
        slices: int = 2,
        devices: int = 2,
        hosts: int = 1,
        arena_bytes: int = 1 << 30,
        up: bool = True,
        **config: Any,
    ) -> None:
        self.config = HeadConfig(
            "test", "run", "/home", "/dir", "/dir", slices, devices, hosts, **config
        )
        self.topology = Topology(slices, hosts, devices)
        self.events: list[tuple[str, int, int, str]] = []
        self.executed: list[tuple[int, c.Execute]] = []
        self.clients: list[int] = []
        self._compiler = Role()
        self.runtime = Runtime(
            self.config,
            self.topology,
            arena_bytes,
            self._compiler,  # type: ignore[arg-type]
            lambda *event: self.events.append(event),
        )
        self.gateway = Gateway(self.runtime, self.clients.append)
        self.hosts: dict[int, ModelHost] = {}
        self.compiler = self.start_compiler()
        self._incarnations = [0] * slices
        if up:
            for index in range(slices):
                self.up(index)

    # --- processes ---

    def start_compiler(self) -> Helper:
        self.compiler = Helper("compiler", lambda command: self.compile(command))
        self._compiler.link = self.compiler.link
        return self.compiler

    def end_compiler(self) -> None:
        self._compiler.link = None
        self.compiler.link.lose(StatusError(Code.UNAVAILABLE, "the compiler ended: SIGKILL"))

    compile: Callable[[Any], Any] = staticmethod(lambda command: compiled())

    def up(self, index: int) -> list[ModelHost]:
        """A (new) incarnation of a slice."""
        self._incarnations[index] += 1
        incarnation = self._incarnations[index]
        count = self.topology.hosts_per_slice
        made = []
        for host in range(index * count, (index + 1) * count):
            link = Link(f"slice {index} host {host % count}", host, index, incarnation)
            self.hosts[host] = ModelHost(self, link)
            made.append(self.hosts[host])
        self.runtime.slice_up(index, incarnation, [host.link for host in made])
        return made

    def lose(self, index: int, story: str = "SIGKILL (signal 9)") -> SliceLostError:
        """A slice is lost, as the fleet tells it."""
        error = SliceLostError(index, self._incarnations[index], story)
        self.runtime.slice_lost(error, "SIGKILL (signal 9)", True)
        count = self.topology.hosts_per_slice
        for host in range(index * count, (index + 1) * count):
            gone = self.hosts.pop(host, None)
            if gone is not None:
                gone.link.lose(error)
                gone.link.ended()
        return error

    @property
    def peers(self) -> list[Any]:
        return [*self.hosts.values(), self.compiler]

    async def settle(
        self, choose: Callable[[int], int] = lambda count: 0, turns: int = 1_000_000
    ) -> None:
        """Everybody does what it was told, in an order that `choose` decides, until all is quiet."""
        quiet = 0
        while quiet < 3 and turns:
            await asyncio.sleep(0)
            busy = [peer for peer in self.peers if not peer.idle]
            if busy:
                busy[choose(len(busy))].step()
                quiet = 0
                turns -= 1
            else:
                quiet += 1

    def sent(self, host: int, *kinds: type[Any]) -> list[Any]:
        """What a host has been told so far."""
        return self.hosts[host].channel.of(*kinds)

    # --- clients ---

    def session(self, **init_data: Any) -> tuple[Session, list[Any]]:
        """A session, and the responses that it has sent."""
        responses: list[Any] = []

        def send(data: bytes) -> None:
            responses.append(proxy.IfrtResponse.FromString(data))

        session = self.gateway.open(25, 6, init_data, "unix", False, "test", send)
        assert isinstance(session, Session)
        return session, responses

    async def check_nothing_left(self) -> None:
        """No buffer is left on a host, no lease is open, no shared memory is in use."""
        await self.settle()
        gc.collect(1)
        for host in self.hosts.values():
            host.link._flush_freed()  # Else it may wait for a moment.
        await self.settle()
        for host in self.hosts.values():
            assert not host.parts, f"left on host {host.link.host}: {host.parts}"
            assert not host.link.waiting
        assert not self.runtime.arena.used_bytes

    def close(self) -> None:
        # Buffers that a failed test keeps would look for the loop when they go.
        self.runtime.buffers.links.clear()
        self.runtime.arena.close()


def run(test: Callable[[World], Awaitable[None]], **sizes: Any) -> None:
    """Runs a test on a loop, with a world of its own."""

    async def main() -> None:
        world = World(**sizes)
        try:
            async with asyncio.timeout(WAIT_S):
                await test(world)
            # What is freed by the end of the world needs the loop.
            await world.settle()
        finally:
            world.close()

    asyncio.run(main())


class Answer:
    """A waiter that keeps what it was called with, and asserts that it is once."""

    def __init__(self) -> None:
        self.calls: list[tuple[StatusError | None, Any]] = []

    def __call__(self, error: StatusError | None, value: Any) -> None:
        assert not self.calls, "answered twice"
        self.calls.append((error, value))

    @property
    def there(self) -> bool:
        return bool(self.calls)

    @property
    def error(self) -> StatusError | None:
        return self.calls[0][0]

    @property
    def value(self) -> Any:
        assert self.calls[0][0] is None
        return self.calls[0][1]


def assert_same(error: StatusError | None, wanted: StatusError) -> None:
    """It is that error, though maybe a fresh one."""
    assert type(error) is type(wanted)
    assert vars(error) == vars(wanted)


def compiled(**facts: Any) -> dict[str, Any]:
    """What the compiler tells of a program: by default f32[4] to f32[4]."""
    told: dict[str, Any] = {
        "name": "jit_f",
        "inputs": [(F32, (4,))],
        "outputs": [(F32, (4,))],
        "donated": [],
        "parameter_shardings": None,
        "output_shardings": None,
        "parameter_layouts": [[0]],
        "output_layouts": [[0]],
        "memory_kinds": [["device"]],
        "fingerprint": b"f",
        "code_bytes": 10,
        "memory": {"output_size_in_bytes": 16, "not_a_field_in_bytes": 1},
        "blob": b"blob",
    }
    return told | facts


# --- shardings ------------------------------------------------------------------------------------


def one(device: int, memory_kind: str | None = None) -> Sharding:
    return shardings.single_device(device, memory_kind)


def tiled(
    devices: Sequence[int],
    tiles: Sequence[int],
    memory_kind: str | None = None,
    order: Sequence[int] | None = None,
) -> Sharding:
    """Tiles of the given numbers; the devices that are left over hold copies."""
    replicas = len(devices) // int(np.prod(tiles))
    message = schema.xla.OpSharding(
        type=3,
        tile_assignment_dimensions=[*tiles, replicas],
        tile_assignment_devices=order or range(len(devices)),
        replicate_on_last_tile_dim=True,
    )
    return shardings.from_op_sharding(tuple(devices), memory_kind, message.SerializeToString())


def replicated(devices: Sequence[int], memory_kind: str | None = None) -> Sharding:
    message = schema.xla.OpSharding(type=0)
    return shardings.from_op_sharding(tuple(devices), memory_kind, message.SerializeToString())
