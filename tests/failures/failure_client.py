"""The client of the failure tests: a process that does what it is told, a line at a time.

Each line of its input is a JSON request `{"do": NAME, ...}`, each line of its output the JSON answer.
It is stock JAX, and knows of Regrow only where it saves, loads and scales up with its libraries. Functions are jitted once and used in every cell, so
they meet slices that have died and returned many times since.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from failure_patience import Patience
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# A wait that outlives this is a hang; the tester's own deadline is a little longer.
DEADLINE_S = 30.0
KINDS = ("device", "pinned_host")
BULK_BYTES = 8 << 20
NOTHING = "nothing was raised"
_SLICE = re.compile(r"DATA_LOSS: slice (\d+)")


class Cluster:
    """The devices by slice, and the functions that every cell uses."""

    def __init__(self) -> None:
        self.slices: dict[int, list[Any]] = {}
        for device in jax.devices():
            self.slices.setdefault(device.slice_index, []).append(device)
        self.plus_one = jax.jit(lambda x: x + 1)
        self.long = jax.jit(_long)
        self.donating = jax.jit(lambda x, y: x + y.sum(), donate_argnums=0)
        # XLA runs one this small inline: the call that launches it waits for the other slices.
        self.small = jax.jit(lambda x: x[0, 0, 0] + x[-1, -1, -1])
        self._sums: dict[tuple[int, ...], Any] = {}

    def mesh(self, slices: Sequence[int]) -> Mesh:
        return Mesh(np.array([self.slices[index] for index in slices]), ("replica", "model"))

    def put(self, slices: Sequence[int], spec: P, value: Any, kind: str = "device") -> jax.Array:
        sharding = NamedSharding(self.mesh(slices), spec, memory_kind=kind)
        return jax.device_put(value, sharding)

    def sums(self, slices: Sequence[int]) -> Callable[[jax.Array], jax.Array]:
        """A program with many collectives across these slices."""
        key = tuple(slices)
        if key not in self._sums:
            sharded = jax.shard_map(
                _sums,
                mesh=self.mesh(slices),
                in_specs=P("replica", "model"),
                out_specs=P("replica", "model"),
            )
            self._sums[key] = jax.jit(sharded)
        return self._sums[key]

    def some(self, slices: Sequence[int]) -> jax.Array:
        """An input of `sums`, and, as it adds up to nothing, its output."""
        count = len(slices) * len(self.slices[0])
        rows = np.arange(count, dtype=np.float32) - (count - 1) / 2
        value = np.broadcast_to(
            rows.reshape(len(slices), -1, 1), (len(slices), count // len(slices), 256)
        )
        return self.put(slices, P("replica", "model"), np.ascontiguousarray(value))

    def work(self, slices: Sequence[int]) -> None:
        """Checks that a program across these slices gives what it must."""
        array = self.some(slices)
        np.testing.assert_array_equal(np.asarray(self.sums(slices)(array)), np.asarray(array))


def _long(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ y), x)


def _sums(x: jax.Array) -> jax.Array:
    for _ in range(8):
        x = x + jax.lax.psum(x, ("replica", "model"))
    return x


def _bad_solve(triangle: jax.Array, right: jax.Array) -> jax.Array:
    solve = jax.ffi.ffi_call(
        "lapack_strsm_ffi",
        jax.ShapeDtypeStruct(right.shape, right.dtype),
        input_layouts=[(0, 1), (0, 1)],
        output_layouts=(0, 1),
    )
    how = {"side": "L", "uplo": "U", "trans_x": "N", "diag": "N"}
    return solve(triangle, right, **{name: np.uint8(ord(value)) for name, value in how.items()})


# --- what a client may be doing when a fault comes ---


class Activity(threading.Thread):
    """Does one thing again and again until it raises or is told to stop."""

    def __init__(self, once: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.rounds = 0
        self.error: str | None = None
        self.ended_at = 0.0
        self._once = once
        self._stop_at: int | None = None

    def run(self) -> None:
        try:
            while self._stop_at is None or self.rounds < self._stop_at:
                self._once()
                self.rounds += 1
        except Exception as error:  # every kind is told to the tester, who judges
            self.error = told(error)
        self.ended_at = time.monotonic()

    def wait_rounds(self, rounds: int, deadline_s: float = DEADLINE_S) -> None:
        patience = Patience(deadline_s)
        while self.rounds < rounds and self.is_alive():
            if patience.over():
                raise TimeoutError(f"round {self.rounds} takes more than {deadline_s:g} s")
            time.sleep(0.001)

    def end(self, more: int | None) -> None:
        """Waits for the error; or, where `more` is given, stops it after so many more rounds."""
        if more is not None:
            self._stop_at = self.rounds + more + 1
        patience = Patience(DEADLINE_S)
        while self.is_alive() and not patience.over():
            self.join(0.05)
        if self.is_alive():
            raise TimeoutError(f"no end within {DEADLINE_S:g} s, in round {self.rounds}")


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class Activities:
    """One method a phase: makes what the phase needs, and returns what is done again and again."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.snapshots: Any = None
        self.after: Callable[[Sequence[int]], None] = lambda live: None

    def begin(self, phase: str, victim: int) -> Callable[[], None]:
        self.after = lambda live: None
        return getattr(self, phase)(victim)

    def idle(self, victim: int) -> Callable[[], None]:
        array = self.cluster.put([victim], P(), np.zeros(4))
        beats = [0]

        def once() -> None:
            # Looks only once in a while: the fault meets a client that waits for nothing.
            time.sleep(0.05)
            beats[0] += 1
            if beats[0] % 4 == 0:
                np.asarray(self.cluster.plus_one(array))

        return once

    def compiling(self, victim: int) -> Callable[[], None]:
        slices = sorted(self.cluster.slices)
        array = self.cluster.some(slices)

        def once() -> None:
            salt = float(np.random.default_rng().random())

            def program(x: jax.Array) -> jax.Array:
                for number in range(6):
                    x = jnp.sin(x + salt * number) @ jnp.cos(x.T).T
                return x

            small = self.cluster.put([victim], P(), np.ones((8, 8), np.float32))
            jax.jit(program)(small).block_until_ready()
            jax.jit(lambda x: x * salt + x.sum())(array).block_until_ready()

        return once

    def to_device(self, victim: int) -> Callable[[], None]:
        value = np.ones((len(self.cluster.slices[victim]), BULK_BYTES // 4), np.float32)

        def once() -> None:
            self.cluster.put([victim], P("model"), value).block_until_ready()

        return once

    def to_host(self, victim: int) -> Callable[[], None]:
        value = np.ones((len(self.cluster.slices[victim]), BULK_BYTES // 4), np.float32)
        array = self.cluster.put([victim], P("model"), value)

        def once() -> None:
            # A copy that no other array of the client shares, else JAX keeps the host's value.
            assert np.asarray(self.cluster.plus_one(array))[-1, -1] == 2

        return once

    def one_slice(self, victim: int) -> Callable[[], None]:
        array = self.cluster.put([victim], P("model"), np.eye(256, dtype=np.float32))

        def once() -> None:
            self.cluster.long(array).block_until_ready()

        return once

    def collective(self, victim: int) -> Callable[[], None]:
        slices = sorted(self.cluster.slices)
        sums, array = self.cluster.sums(slices), self.cluster.some(slices)
        done = sums(array).block_until_ready()
        outs: list[jax.Array] = []

        def once() -> None:
            outs.clear()
            outs.extend(step(array) for _ in range(4) for step in (sums, self.cluster.small))
            given = self.cluster.some(slices)
            outs.append(self.cluster.donating(given, outs[-2]))
            assert given.is_deleted()
            jax.block_until_ready(outs)

        def after(live: Sequence[int]) -> None:
            if sorted(live) != slices:
                return
            # No slice was lost: what was not in flight is there, what was is lost for ever.
            np.testing.assert_array_equal(np.asarray(array), np.asarray(done))
            for out in outs:
                first, second = (
                    _raised(functools.partial(jax.block_until_ready, out)) for _ in "12"
                )
                assert first == second, f"{first} became {second}"
                assert first == NOTHING or "lost its collective links" in first, first

        self.after = after
        return once

    def resharding(self, victim: int) -> Callable[[], None]:
        from pathwaysutils.experimental import reshard

        slices = sorted(self.cluster.slices)
        other = next(index for index in slices if index != victim)
        value = np.arange(1 << 20, dtype=np.float32).reshape(2, -1)
        here = self.cluster.put([victim], P("model"), value)
        mine, theirs = (NamedSharding(self.cluster.mesh([s]), P("model")) for s in (victim, other))
        turned = NamedSharding(self.cluster.mesh([other]), P(None, "model"))

        def once() -> None:
            there = jax.device_put(here, theirs)
            back = jax.device_put(there, mine)
            across = reshard.reshard(back, turned, donate=False)
            assert np.asarray(across)[1, -1] == value[1, -1]

        return once

    def snapshot(self, victim: int) -> Callable[[], None]:
        from orbax.checkpoint.experimental.v1._src.training.pathways.snapshotter import Snapshotter

        if self.snapshots is None:
            self.snapshots = Snapshotter(replica_axis_index=0)
        slices = sorted(self.cluster.slices)
        base = np.arange(4096, dtype=np.float32).reshape(2, -1)
        step = [0]
        state = {"w": self.cluster.put(slices, P(None, "model"), base)}

        def once() -> None:
            step[0] += 1
            state["w"] = self.cluster.plus_one(state["w"])
            self.snapshots.save(step[0], state)
            self.snapshots.join()
            jax.block_until_ready(state)

        def after(live: Sequence[int]) -> None:
            sharding = NamedSharding(self.cluster.mesh(live), P(None, "model"))
            wanted = {"w": jax.ShapeDtypeStruct(base.shape, base.dtype, sharding=sharding)}
            number = self.snapshots.latest.step
            restored = self.snapshots.load(wanted)
            np.testing.assert_array_equal(np.asarray(restored["w"]), base + number)

        self.after = after
        return once

    def saving(self, victim: int) -> Callable[[], None]:
        """Our own snapshotter saves."""
        snapshots, state, base, step = self._own_snapshots()

        def once() -> None:
            step[0] += 1
            state["w"] = self.cluster.plus_one(state["w"])
            snapshots.save(step[0], state)
            snapshots.join(DEADLINE_S)
            jax.block_until_ready(state)

        self.after = lambda live: self._check_own(snapshots, live, base)
        return once

    def loading(self, victim: int) -> Callable[[], None]:
        """Our own snapshotter loads."""
        snapshots, state, base, _ = self._own_snapshots()

        def once() -> None:
            restored = snapshots.load(state)
            np.testing.assert_array_equal(np.asarray(restored["w"]), base)

        self.after = lambda live: self._check_own(snapshots, live, base)
        return once

    def _own_snapshots(self) -> tuple[Any, dict[str, jax.Array], np.ndarray[Any, Any], list[int]]:
        """A snapshotter that has a snapshot of step 0, its state, and the value of that."""
        from regrow.elastic import Snapshotter

        snapshots = Snapshotter(replica_axis_index=0)
        base = np.arange(4096, dtype=np.float32).reshape(2, -1)
        slices = sorted(self.cluster.slices)
        state = {"w": self.cluster.put(slices, P(None, "model"), base)}
        assert snapshots.save(0, state)
        snapshots.join(DEADLINE_S)
        return snapshots, state, base, [0]

    def _check_own(self, snapshots: Any, live: Sequence[int], base: np.ndarray[Any, Any]) -> None:
        """What was saved last is there, whole, for the slices that live."""
        sharding = NamedSharding(self.cluster.mesh(live), P(None, "model"))
        wanted = {"w": jax.ShapeDtypeStruct(base.shape, base.dtype, sharding=sharding)}
        number = snapshots.latest.step
        restored = snapshots.load(wanted)
        np.testing.assert_array_equal(np.asarray(restored["w"]), base + number)

    def scaling_up(self, victim: int) -> Callable[[], None]:
        """A state goes from some slices to all of them, and is used there; and back."""
        from regrow.elastic.progress import phase

        every = sorted(self.cluster.slices)
        value = np.arange(4096, dtype=np.float32).reshape(2, -1)
        few, many = (
            NamedSharding(self.cluster.mesh(slices), P(None, "model"))
            for slices in (every[:-1], every)
        )
        state = [jax.device_put(value, few)]

        def once() -> None:
            with phase("scale-up"):
                state[0] = jax.device_put(state[0], many)
                state[0] = self.cluster.plus_one(state[0]) - 1
                self.cluster.work(every)
            state[0] = jax.device_put(state[0], few)
            np.testing.assert_array_equal(np.asarray(state[0]), value)

        return once

    def training(self, victim: int) -> Callable[[], None]:
        """A loop that reacts to losses: goes on over the slices that are left."""
        live = sorted(self.cluster.slices)
        state = [self.cluster.some(live)]

        def once() -> None:
            try:
                state[0] = self.cluster.sums(live)(state[0])
                state[0].block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                found = _SLICE.match(str(error))
                if found is None or int(found[1]) not in live:
                    raise
                if "lost its collective links" not in str(error):
                    live.remove(int(found[1]))
                if len(live) == 1:
                    self.cluster.sums(live)(self.cluster.some(live)).block_until_ready()
                    raise
                state[0] = self.cluster.some(live)

        return once


# --- requests ---


class Driver:
    """Carries out the tester's requests."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.activities = Activities(self.cluster)
        self.activity: Activity | None = None
        self.kept: dict[int, list[jax.Array]] = {}
        self.expected: dict[int, np.ndarray[Any, Any]] = {}
        self.crashed: list[str] = []

    def arm(self) -> None:
        """Makes arrays on every slice, in both memories."""
        for index in self.cluster.slices:
            value = np.random.default_rng(index).random((4, 6), np.float32)
            self.expected[index] = value
            self.kept[index] = [self.cluster.put([index], P("model"), value, k) for k in KINDS]
        jax.block_until_ready(self.kept)
        self.cluster.work(sorted(self.cluster.slices))

    def begin(self, phase: str, victim: int) -> None:
        """Starts an activity; returns when it is in full swing."""
        self.activity = Activity(self.activities.begin(phase, victim))
        self.activity.start()
        self.activity.wait_rounds(1)

    def end(self, more: int | None = None) -> dict[str, Any]:
        """How the activity ended."""
        assert self.activity is not None
        try:
            self.activity.end(more)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; what was to abort told {self.crashed}") from None
        ended = self.activity
        return {"error": ended.error, "ended_at": ended.ended_at, "rounds": ended.rounds}

    def rounds(self) -> int:
        assert self.activity is not None
        return self.activity.rounds

    def together(self, live: Sequence[int]) -> str:
        """What a program across these slices raises."""
        return _raised(lambda: self.cluster.work(live))

    def survive(self, live: Sequence[int]) -> None:
        """Checks the arrays of living slices, and that they work, each and together."""
        for index in live:
            for array in self.kept[index]:
                np.testing.assert_array_equal(np.asarray(array.copy()), self.expected[index])
            self.cluster.work([index])
        self.cluster.work(live)
        self.activities.after(live)

    def lost(self, slices: Sequence[int]) -> list[str]:
        """What the arrays of lost slices, and what derives from them, raise."""
        return [
            _raised(functools.partial(use, array))
            for index in slices
            for array in self.kept[index]
            for use in (self.cluster.plus_one, jax.block_until_ready, _copied)
        ]

    def returned(self, slices: Sequence[int]) -> None:
        """Checks that returned slices take new arrays and old functions, each and together."""
        for index in slices:
            self.cluster.work([index])
            for kind in KINDS:
                array = self.cluster.put([index], P("model"), np.ones((4, 6), np.float32), kind)
                np.testing.assert_array_equal(np.asarray(array), np.ones((4, 6)))
        self.cluster.work(sorted(self.cluster.slices))

    def abort(self, victim: int) -> None:
        """Runs a custom call on a slice that crashes the process which executes it.

        The solver takes the triangle to be as large as the right side, which is far more memory than
        there is behind it.
        """
        small = self.cluster.put([victim], P(), np.ones((1, 1), np.float32))
        large = self.cluster.put([victim], P(), np.ones((1 << 16, 1), np.float32))
        self.crashed = []

        def crash() -> None:
            self.crashed.append(_raised(lambda: jax.jit(_bad_solve)(small, large)))

        threading.Thread(target=crash, daemon=True).start()

    def fill(self, victim: int, size: int) -> None:
        """Keeps so many bytes on a slice."""
        array = self.cluster.put([victim], P(), np.float32(1))
        filled = jax.jit(lambda x: jnp.full(size // 4, x))(array)
        self.kept[-1] = [filled.block_until_ready()]


def _copied(array: jax.Array) -> Any:
    return np.asarray(array.copy())


def _raised(act: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(act())
    except Exception as error:
        return told(error)
    return NOTHING


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver()
    print(json.dumps({"ready": jax.__version__}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(driver, request.pop("do"))(**request)}
        except Exception as error:
            logging.disable(logging.NOTSET)
            logging.getLogger(__name__).exception("%s", line)
            logging.disable(logging.CRITICAL)
            answer = {"failed": told(error)}
        print(json.dumps(answer), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
