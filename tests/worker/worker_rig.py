"""Parts of a worker in this process, driven as the head drives them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib import _jax
from jaxlib import xla_client as xc

from regrow.channel import commands as c
from regrow.channel.arena import Arena, ArenaView, Block
from regrow.wire.dtypes import kind_of
from regrow.worker.compiler import Compiler
from regrow.worker.host import Host

WAIT_S = 30.0
F32 = 11


class Memory:
    """Shared memory of a head, opened as a worker opens it."""

    def __init__(self) -> None:
        self.arena = Arena(64 << 20)
        self.view = ArenaView()
        self.blocks: dict[int, Block] = {}
        self.released: list[int] = []
        self._leases = itertools.count(1)

    def put(self, data: bytes) -> tuple[tuple[int, int, int], int]:
        """Bytes in a block of their own: how to refer to it, and its lease."""
        block = self.arena.alloc(len(data))
        block.view[:] = data
        segment, _, _ = ref = block.ref()
        self.view.open(segment, self.arena.segment_path(segment), self.arena.segment_bytes(segment))
        lease = next(self._leases)
        self.blocks[lease] = block
        return ref, lease

    def segment(self, ref: tuple[int, int, int]) -> c.Segment:
        """What a worker is told before it can open that."""
        number = ref[0]
        path, size = self.arena.segment_path(number), self.arena.segment_bytes(number)
        return c.Segment(number, path, size)

    def release(self, lease: int) -> None:
        """The worker has no use for a block any longer; it is overwritten, to show if it had."""
        self.released.append(lease)
        block = self.blocks.pop(lease)
        block.view[:] = b"\xee" * block.size
        block.release()

    def close(self) -> None:
        self.view.close()
        self.arena.close()


class Reports:
    """A channel to the head that keeps what comes, unpacked."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._changed = threading.Condition()
        self.listeners: list[Callable[[Any], None]] = []

    def send(self, payload: bytes) -> None:
        with self._changed:
            new = c.unpack(payload)
            self.all += new
            for command in new:
                for listener in self.listeners:
                    listener(command)
            self._changed.notify_all()

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [report for report in self.all if isinstance(report, kinds)]

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), f"waited in vain for {what}"
        return condition()

    def answer(self, rid: int) -> Any:
        """The `Reply` or `Failed` to a question."""

        def find() -> Any:
            found = [r for r in self.of(c.Reply, c.Failed) if r.rid == rid]
            assert len(found) < 2, "answered twice"
            return found[0] if found else None

        return self.wait(find, f"an answer to {rid}")


class HostRig:
    """A host on a thread of its own."""

    def __init__(self, devices: Sequence[int], memory: Memory | None = None, **how: Any) -> None:
        self.host = Host(devices, "127.0.0.1")
        self.reports = Reports()
        self.host.connect(self.reports)
        self.memory = memory
        if memory is not None:
            self.reports.listeners.append(self._on_report)
        self._rids = itertools.count(1)
        self._aids = itertools.count(1000)
        self._thread = threading.Thread(target=self.host.run, daemon=True)
        if how.get("running", True):
            self._thread.start()

    def start(self) -> None:
        self._thread.start()

    def _on_report(self, command: Any) -> None:
        if isinstance(command, c.Released) and self.memory is not None:
            for lease in command.leases:
                self.memory.release(lease)

    def tell(self, *commands: Any) -> None:
        self.host.on_payload(c.pack_all(commands))

    def ask(self, make: Callable[[int], Any]) -> Any:
        """The answer to a question."""
        return self.reports.answer(self.asked(make))

    def asked(self, make: Callable[[int], Any]) -> int:
        rid = next(self._rids)
        self.tell(make(rid))
        return rid

    def aid(self) -> int:
        return next(self._aids)

    def put(self, value: Any, device: int = 4, *, shared: bool = False, **how: Any) -> int:
        """An array on one device; with `shared` its bytes are in shared memory."""
        value = np.asarray(value)
        aid, lease = self.aid(), 0
        bulk: Any = value.tobytes()
        if shared:
            assert self.memory is not None
            bulk, lease = self.memory.put(bulk)
            self.tell(self.memory.segment(bulk))
        shard = c.HostShard(device, 0, value.shape, None)
        kind, where = kind_of(value.dtype), how.get("memory_kind", "device")
        keep = how.get("keep", False)
        self.tell(c.Put(aid, kind, bulk, (shard,), where, False, lease, keep))
        return aid

    def get(self, aid: int, shard: int = 0) -> Any:
        """The bytes of a shard, or the error."""
        answer = self.ask(lambda rid: c.Get(rid, aid, shard, None, None, None))
        return answer.value if isinstance(answer, c.Reply) else answer

    def floats(self, aid: int, shard: int = 0) -> Any:
        data = self.get(aid, shard)
        return np.frombuffer(data, np.float32).tolist() if isinstance(data, bytes) else data

    def ready(self, *aids: int) -> Any:
        return self.ask(lambda rid: c.Ready(rid, aids))

    def load(
        self,
        compiler: Compiler,
        text: str,
        devices: Sequence[int] = (4,),
        **how: Any,
    ) -> int:
        """Loads a program; its number."""
        number = self.aid()
        told = compile_program(compiler, text, len(devices))
        outs = [(kind, tuple(dims)) for kind, dims in told["outputs"]]
        options, blob = options_of(len(devices)), told["blob"]
        self.tell(
            c.Load(number, told["name"], blob, b"", options, devices, 1, outs, how.get("epoch", 0))
        )
        return number

    def execute(self, program: int, *args: int, outs: int = 1, status: bool = False) -> list[int]:
        """Starts a program: the numbers of its results, and of its status if wanted."""
        results = [self.aid() for _ in range(outs + status)]
        launch = next(self._rids)
        end = results[-1] if status else 0
        self.tell(c.Execute(launch, program, args, results[:outs], end))
        return results

    def close(self) -> None:
        self.host.stop()
        if self._thread.ident is not None:
            self._thread.join(WAIT_S)
        self.host._helpers.shutdown(wait=True)


# --- programs -------------------------------------------------------------------------------------

ADD_ONE = """
module @add_one {
  func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
    %one = stablehlo.constant dense<1.0> : tensor<4xf32>
    %sum = stablehlo.add %a, %one : tensor<4xf32>
    return %sum : tensor<4xf32>
  }
}
"""

DONATING = ADD_ONE.replace("add_one", "donating").replace(
    "%a: tensor<4xf32>", "%a: tensor<4xf32> {tf.aliasing_output = 0 : i32}"
)

TWO_RESULTS = """
module @two {
  func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<f32>) {
    %sum = stablehlo.add %a, %b : tensor<4xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %total = stablehlo.reduce(%sum init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    return %sum, %total : tensor<4xf32>, tensor<f32>
  }
}
"""

SPLIT = '{mhlo.sharding = "{devices=[2]<=[2]}"}'
COPIED = '{mhlo.sharding = "{replicated}"}'
# The second device's half, summed over both devices.
SHARDED = f"""
module @sharded attributes {{mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32}} {{
  func.func public @main(%a: tensor<4xf32> {SPLIT}) -> (tensor<4xf32> {SPLIT}, tensor<f32> {COPIED}) {{
    %one = stablehlo.constant dense<1.0> : tensor<4xf32>
    %sum = stablehlo.add %a, %one : tensor<4xf32>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %total = stablehlo.reduce(%sum init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    return %sum, %total : tensor<4xf32>, tensor<f32>
  }}
}}
"""

# Takes about a second for each unit of %n: a loop that the compiler cannot shorten.
SLOW = """
module @slow {
  func.func public @main(%a: tensor<4xf32>, %n: tensor<i32>) -> tensor<4xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %step = stablehlo.constant dense<1> : tensor<i32>
    %r:2 = stablehlo.while(%i = %zero, %x = %a) : tensor<i32>, tensor<4xf32>
      cond {
        %more = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %more : tensor<i1>
      } do {
        %next = stablehlo.add %i, %step : tensor<i32>
        %y = stablehlo.cosine %x : tensor<4xf32>
        stablehlo.return %next, %y : tensor<i32>, tensor<4xf32>
      }
    return %r#1 : tensor<4xf32>
  }
}
"""


def artifact(text: str) -> bytes:
    """A portable artifact, as clients send their programs."""
    from jaxlib.mlir.dialects import stablehlo

    version = stablehlo.get_current_version()
    data: bytes = _jax.mlir.serialize_portable_artifact(text, version)
    return data


def options_of(partitions: int = 1, replicas: int = 1) -> bytes:
    """Serialised compile options."""
    options = xc.CompileOptions()
    options.num_replicas = replicas
    options.num_partitions = partitions
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = replicas, partitions
    build.use_spmd_partitioning = partitions > 1
    data: bytes = options.SerializeAsString()
    return data


def compiler_rig(devices: int) -> Compiler:
    compiler = Compiler(devices)
    compiler.connect(Reports())
    return compiler


_rids = itertools.count(1)


def ask_compiler(compiler: Compiler, make: Callable[[int], Any]) -> Any:
    """The compiler's answer."""
    rid = next(_rids)
    compiler.on_payload(c.pack_all([make(rid)]))
    return compiler._sender.answer(rid)


_compiled: dict[tuple[str, int, bool], dict[str, Any]] = {}


def compile_program(
    compiler: Compiler, text: str, partitions: int = 1, *, spans: bool = False
) -> dict[str, Any]:
    """What the compiler tells of a program."""
    key = (text, partitions, spans)
    if key not in _compiled:
        program, options = artifact(text), options_of(partitions)
        answer = ask_compiler(
            compiler, lambda rid: c.Compile(rid, repr(key).encode(), program, options, spans, 0)
        )
        assert isinstance(answer, c.Reply), answer
        _compiled[key] = answer.value
    return _compiled[key]
