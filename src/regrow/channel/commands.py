"""What head and worker say to each other: typed commands, packed with msgpack.

A payload of the channel is one list of packed commands, each ``[op, *fields]``. Heads command, workers
report; every field is a number, text, bytes or a list of these, so nothing that a peer sends is
evaluated.

Words used below:
    aid: number of a buffer, given by the head. Each host that owns shards of it keeps its *part*: the
        local shards, in the order of the sharding.
    shard: position in the part of one host, from 0.
    bulk: where bytes are: ``bytes`` itself, or ``(segment, offset, size)`` in the head's arena.
    launch: number of one execution of a program, rising; the same on every host that takes part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack

Bulk: TypeAlias = bytes | tuple[int, int, int]


class HostShard(NamedTuple):
    """Where one shard lies inside a bulk: offset in bytes, dims, strides in bytes (None: C order)."""

    device: int
    offset: int
    dims: tuple[int, ...]
    strides: tuple[int, ...] | None


# --- head to worker -------------------------------------------------------------------------------


class Segment(NamedTuple):
    """A segment of the head's arena that later bulks refer to."""

    segment: int
    path: str
    size: int


class Put(NamedTuple):
    """Make a part from host memory. `lease` is reported back when the bulk is no longer needed.

    With `keep` the arrays may live in the bulk, so that the lease lasts as long as they do.
    """

    aid: int
    kind: int
    bulk: Bulk
    shards: Sequence[HostShard]
    memory_kind: str
    spans: bool
    lease: int
    keep: bool


class Load(NamedTuple):
    """Load an executable: a serialised blob, or a program with host callbacks to compile here.

    `devices` are logical ids in the order of the device assignment, `replicas` its first dimension;
    `outs` gives (kind, dims) of each result.
    """

    exe: int
    name: str
    blob: bytes
    program: bytes
    options: bytes
    devices: Sequence[int]
    replicas: int
    outs: Sequence[tuple[int, tuple[int, ...]]]
    epoch: int


class Unload(NamedTuple):
    """Forget executables."""

    exes: Sequence[int]


class Execute(NamedTuple):
    """Run an executable. `status` is an aid that stands for the end of the run, or 0."""

    launch: int
    exe: int
    args: Sequence[int]
    outs: Sequence[int]
    status: int


class Take(NamedTuple):
    """Make a part of single shards of other parts, without a copy."""

    aid: int
    sources: Sequence[tuple[int, int]]


class Copy(NamedTuple):
    """Copy shards of this host to (other) devices or another memory kind of this host."""

    aid: int
    sources: Sequence[tuple[int, int]]
    devices: Sequence[int]
    memory_kind: str


class Digest(NamedTuple):
    """Hash shards of this host, and copy them to a kind of its memory if there are numbers for that.

    `sources` are the shards of one array after the other, each time one for each of `devices`, which
    then have the hashes of their own shards. `copies` has none, or one for each array.
    """

    aid: int
    sources: Sequence[tuple[int, int]]
    devices: Sequence[int]
    copies: Sequence[int]
    memory_kind: str


class Expect(NamedTuple):
    """Promise a part whose shards arrive later with `Fill`, by other ways than this queue."""

    aid: int
    kind: int
    devices: Sequence[int]
    memory_kind: str


class Fill(NamedTuple):
    """One shard of an expected part; handled at once, not in the order of the queue."""

    aid: int
    shard: int
    dims: Sequence[int]
    bulk: Bulk
    lease: int


class FillError(NamedTuple):
    """An expected part will not come."""

    aid: int
    code: int
    message: str


class Get(NamedTuple):
    """Bring one shard to the host: into `bulk`, or inline in the reply where that is None.

    `region` is a list of (start, stop) for a part of the shard, `strides` the byte strides wanted.
    """

    rid: int
    aid: int
    shard: int
    bulk: Bulk | None
    strides: tuple[int, ...] | None
    region: Sequence[tuple[int, int]] | None


class Ready(NamedTuple):
    """Reply when all these parts hold values; fail with the first error."""

    rid: int
    aids: Sequence[int]


class Free(NamedTuple):
    """Drop parts."""

    aids: Sequence[int]


class FormEpoch(NamedTuple):
    """Join the gang of an epoch. `members` are, by node, the logical device ids of that host.

    They meet at `address`, where this host registers by `key`.
    """

    epoch: int
    node: int
    members: Sequence[Sequence[int]]
    address: str
    key: int


class FailEpoch(NamedTuple):
    """End an epoch at once: poison what is in flight and cut its collective links.

    Where a program failed by itself, its `launch` (0: whichever is in flight) ends with its `own` text
    and `code` everywhere; what else is in flight ends with `message`.
    """

    epoch: int
    message: str
    ports: Sequence[int]
    launch: int = 0
    code: int = 0
    own: str = ""


class Adopt(NamedTuple):
    """Move idle arrays of ended epochs into the host's own client, to let the old clients go."""


class Ping(NamedTuple):
    """Ask for a sign of life."""

    number: int


class CallbackResult(NamedTuple):
    """The answer to a `Callback`: a frame of `channel.rgcb`."""

    call: int
    answer: bytes


class Exit(NamedTuple):
    """End the worker process in good order."""


class Fail(NamedTuple):
    """Fail on purpose (`worker/faults.py`); handled at once."""

    fault: str


class StartTrace(NamedTuple):
    """Begin to record what the process does; any trace that goes on is dropped.

    `host_level` is the `host_tracer_level` of JAX's ProfileOptions.
    """

    rid: int
    host_level: int


class StopTrace(NamedTuple):
    """Stop recording, and write the trace to `DIRECTORY/plugins/profile/SESSION/NAME.*`."""

    rid: int
    directory: str
    session: str
    name: str


class Drain(NamedTuple):
    """Reply when nothing that was launched or promised before is under way any longer."""

    rid: int


class Save(NamedTuple):
    """Write parts to the storage at `url`, and reply with what they are made of (`worker/suspending.py`).

    `turn` is where in the whole to begin, from 0 to 1.
    """

    rid: int
    url: str
    aids: Sequence[int]
    turn: float


class GiveUp(NamedTuple):
    """Stop saving; handled at once."""


class SavedShard(NamedTuple):
    """One shard as it is on storage: what `suspend.ShardEntry` says."""

    device: int
    kind: int
    dims: Sequence[int]
    memory_kind: str
    nbytes: int
    chunks: Sequence[str]


class LoadParts(NamedTuple):
    """Read parts, each (aid, shards), from the storage at `url`; reply when they are all there."""

    rid: int
    url: str
    chunk_bytes: int
    parts: Sequence[tuple[int, Sequence[SavedShard]]]


class WriteShards(NamedTuple):
    """Write shards of a part to files below `url`, each (shard, name), and `whole` files as they are."""

    rid: int
    url: str
    aid: int
    files: Sequence[tuple[int, str]]
    whole: Sequence[tuple[str, bytes]]


class ReadShards(NamedTuple):
    """Make a part of regions of the zarr array `name` at `url`; reply when it is there.

    `regions` are, by shard, lists of (start, stop).
    """

    rid: int
    url: str
    name: str
    aid: int
    kind: int
    shape: Sequence[int]
    devices: Sequence[int]
    regions: Sequence[Sequence[tuple[int, int]]]
    memory_kind: str


class Measure(NamedTuple):
    """Reply with how many bytes a second can be written to the storage at `url`."""

    rid: int
    url: str


class Go(NamedTuple):
    """End by SIGTERM at once: what the notice was about is not going to be saved."""


class SetColocated(NamedTuple):
    """Load a colocated Python program: the user's own code, pickled by the user's own process.

    `outs` gives (kind, dims, devices) of each result, `hosts` the devices of every host.
    """

    exe: int
    text: bytes
    outs: Sequence[tuple[int, tuple[int, ...], Sequence[int]]]
    hosts: Sequence[Sequence[int]]


# --- head to compiler -----------------------------------------------------------------------------


class Compile(NamedTuple):
    """Compile a program for devices 0…n-1. Replied to with a map (`worker/compiler.py`)."""

    rid: int
    key: bytes
    program: bytes
    options: bytes
    spans: bool
    callbacks: int


class Identify(NamedTuple):
    """Ask for what a program is apart from its source locations. Replied to with a digest."""

    rid: int
    program: bytes


class Describe(NamedTuple):
    """Ask for the "cost" or "text" of a compiled program."""

    rid: int
    what: str
    key: bytes
    blob: bytes
    options: bytes
    devices: int


# --- worker to head -------------------------------------------------------------------------------


class Up(NamedTuple):
    """The worker is ready: versions and the path to it in words."""

    jaxlib: str
    shared_memory: bool


class Reply(NamedTuple):
    """The answer to a command with a `rid`."""

    rid: int
    value: Any


class Failed(NamedTuple):
    """The error to a command with a `rid`. `epoch` is not 0 where a program of that epoch failed."""

    rid: int
    code: int
    message: str
    epoch: int


class Released(NamedTuple):
    """These leases of bulks are over."""

    leases: Sequence[int]


class Pong(NamedTuple):
    """A sign of life: the number asked with, and how many commands were carried out so far."""

    number: int
    done: int


class EpochFormed(NamedTuple):
    """This host has joined; its collectives listen on `port`."""

    epoch: int
    port: int


class EpochBroken(NamedTuple):
    """A program of this epoch failed here, or the epoch could not be formed (then `launch` is 0).

    `code` is 0 unless the error is the program's own for certain. `cause` is the epoch whose failure
    the error tells of, where that is another one: then an argument was lost with it.
    """

    epoch: int
    launch: int
    message: str
    code: int = 0
    cause: int = 0


class Noticed(NamedTuple):
    """This process was told that it is going to be ended."""

    why: str


class Callback(NamedTuple):
    """A program calls a function of the user's process."""

    call: int
    nonce: str
    token: int
    function: int
    payload: bytes


class CallbackFreed(NamedTuple):
    """No executable uses these callbacks any longer."""

    nonce: str
    token: int


Command: TypeAlias = NamedTuple

_COMMANDS: Final[tuple[type[Any], ...]] = (
    Segment,
    Put,
    Load,
    Unload,
    Execute,
    Take,
    Copy,
    Expect,
    Fill,
    FillError,
    Get,
    Ready,
    Free,
    FormEpoch,
    FailEpoch,
    Adopt,
    Ping,
    CallbackResult,
    Exit,
    SetColocated,
    Compile,
    Describe,
    Identify,
    Up,
    Reply,
    Failed,
    Released,
    Pong,
    EpochFormed,
    EpochBroken,
    Callback,
    CallbackFreed,
    Fail,
    StartTrace,
    StopTrace,
    Drain,
    Save,
    GiveUp,
    LoadParts,
    Measure,
    Go,
    Noticed,
    WriteShards,
    ReadShards,
    Digest,
)
_OPS: Final[dict[type[Any], int]] = {command: op for op, command in enumerate(_COMMANDS)}
_packer = msgpack.Packer(use_bin_type=True, autoreset=True)


def pack(command: Any) -> bytes:
    """The bytes of one command. Payloads are a plain concatenation of them. One thread only."""
    return _packer.pack((_OPS[type(command)], *command))  # type: ignore[no-any-return]


def pack_all(commands: Iterable[Any]) -> bytes:
    """The bytes of several commands, with a packer of their own: safe in any thread."""
    packer = msgpack.Packer(use_bin_type=True)
    return b"".join(packer.pack((_OPS[type(command)], *command)) for command in commands)


def unpack(payload: bytes | memoryview) -> list[Any]:
    """The commands in a payload.

    Raises:
        ValueError: The bytes are no commands.
    """
    unpacker = msgpack.Unpacker(use_list=False, strict_map_key=False, max_buffer_size=0)
    unpacker.feed(payload)
    return [_COMMANDS[fields[0]](*fields[1:]) for fields in unpacker]
