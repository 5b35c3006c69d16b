"""Executions on one host: when they run, and what becomes of their results."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from worker_rig import (
    ADD_ONE,
    DONATING,
    F32,
    SHARDED,
    TWO_RESULTS,
    HostRig,
    compile_program,
    options_of,
)

from regrow.channel import commands as c
from regrow.errors import Code
from regrow.worker.compiler import Compiler
from regrow.worker.launch import Launcher
from regrow.worker.platform import COPY_NOW, Domain
from regrow.worker.programs import Program
from regrow.worker.store import Part, PartError, Store

RELAY: Any = None  # no program here calls back


class Bench:
    """A launcher over a store; helpers run when the test says so."""

    def __init__(self, home: Domain, compiler: Compiler) -> None:
        self.home = home
        self.compiler = compiler
        self.store = Store(home)
        self.spawned: list[Any] = []
        self.launcher = Launcher(self.store, self.spawned.append)
        self._launch = 0

    def program(self, text: str, devices: tuple[int, ...] = (4,)) -> Program:
        told = compile_program(self.compiler, text, len(devices))
        outs = [(kind, tuple(dims)) for kind, dims in told["outputs"]]
        options = options_of(len(devices))
        command = c.Load(1, told["name"], told["blob"], b"", options, devices, 1, outs, 0)
        return Program(command, self.home, RELAY)

    def part(self, *values: Any, devices: tuple[int, ...] = (4,)) -> Part:
        shards = [
            self.home.put(np.asarray(value, np.float32), device, "device", COPY_NOW)
            for value, device in zip(values, devices, strict=True)
        ]
        return Part(self.home, devices, shards)

    def run(self, program: Program, args: list[int], outs: list[int], status: int = 0) -> None:
        self._launch += 1
        command = c.Execute(self._launch, 1, args, outs, status)
        self.launcher.run_home(command, program)

    def help(self) -> None:
        """All that was left to helpers is done."""
        while self.spawned:
            self.spawned.pop(0)()

    def values(self, aid: int) -> list[Any]:
        return [np.asarray(single).tolist() for single in self.store.get(aid).singles()]

    def error(self, aid: int) -> PartError:
        error = self.store.get(aid).error
        assert error is not None
        return error


@pytest.fixture
def bench(home: Domain, compiler: Compiler) -> Bench:
    return Bench(home, compiler)


def test_a_program_runs_at_once(bench: Bench) -> None:
    bench.store.set(1, bench.part([1, 2, 3, 4]))
    bench.store.set(2, bench.part([1, 1, 1, 1]))
    bench.run(bench.program(TWO_RESULTS), [1, 2], [3, 4], status=5)
    assert not bench.spawned
    assert bench.values(3) == [[2, 3, 4, 5]]
    assert bench.values(4) == [14]
    status = bench.store.get(5)
    for token in status.arrays():
        token.block_until_ready()


def test_results_are_arguments_of_the_next(bench: Bench) -> None:
    program = bench.program(ADD_ONE)
    bench.store.set(1, bench.part([0, 0, 0, 0]))
    for number in range(1, 40):
        bench.run(program, [number], [number + 1])
    assert bench.values(40) == [[39] * 4]


def test_shards_are_put_together_for_a_program_on_two_devices(bench: Bench) -> None:
    program = bench.program(SHARDED, (5, 4))
    bench.store.set(1, bench.part([1, 2], [3, 4], devices=(5, 4)))
    bench.run(program, [1], [2, 3])
    assert bench.values(2) == [[2, 3], [4, 5]]
    assert bench.values(3) == [14, 14]
    bench.run(program, [2], [4, 5])
    assert bench.values(4) == [[3, 4], [5, 6]]
    assert bench.values(1) == [[1, 2], [3, 4]]


def test_an_error_among_the_arguments_is_that_of_the_results(bench: Bench) -> None:
    bench.store.set(1, bench.part([1, 2, 3, 4]))
    bench.store.set(2, Part.failed(bench.home, PartError(Code.ABORTED, "text", 7)))
    bench.run(bench.program(TWO_RESULTS), [1, 2], [3, 4], status=5)
    for aid in (3, 4, 5):
        assert (bench.error(aid).code, bench.error(aid).message) == (Code.ABORTED, "text")
        assert bench.error(aid).epoch == 7
    bench.run(bench.program(ADD_ONE), [9], [6])
    assert bench.error(6).message == "buffer 9 is not on this host"


def test_arguments_that_do_not_fit_the_program(bench: Bench) -> None:
    program = bench.program(ADD_ONE)
    bench.store.set(1, bench.part([1, 2, 3]))
    bench.store.set(2, bench.part([1, 2, 3, 4], devices=(5,)))
    bench.run(program, [1], [3], status=4)
    bench.run(program, [1, 1], [5])
    bench.run(program, [], [6])
    for aid in (3, 4, 5, 6):
        assert bench.error(aid).message
    bench.store.set(1, bench.part([1, 2, 3, 4]))
    bench.run(program, [1], [7])
    assert bench.values(7) == [[2, 3, 4, 5]]


def test_what_is_still_to_come_is_waited_for_aside(bench: Bench) -> None:
    bench.store.set(1, Part.expected(bench.home, (4,)))
    bench.store.set(2, bench.part([1, 1, 1, 1]))
    bench.run(bench.program(TWO_RESULTS), [1, 2], [3, 4], status=5)
    assert len(bench.spawned) == 1
    # What depends on it waits, too; other things go on.
    bench.run(bench.program(ADD_ONE), [3], [6])
    assert len(bench.spawned) == 2
    bench.store.set(7, bench.part([0, 0, 0, 0]))
    bench.run(bench.program(ADD_ONE), [7], [8])
    assert bench.values(8) == [[1] * 4]
    bench.store.get(1).resolve(bench.part([1, 2, 3, 4]))
    bench.help()
    assert bench.values(3) == [[2, 3, 4, 5]]
    assert bench.values(4) == [14]
    assert bench.values(6) == [[3, 4, 5, 6]]
    assert list(bench.store.get(5).arrays())


def test_an_error_that_comes_late(bench: Bench) -> None:
    bench.store.set(1, Part.expected(bench.home, (4,)))
    bench.run(bench.program(ADD_ONE), [1], [2], status=3)
    bench.store.get(1).resolve(Part.failed(bench.home, PartError(Code.DATA_LOSS, "slice 1")))
    bench.help()
    for aid in (2, 3):
        assert (bench.error(aid).code, bench.error(aid).message) == (Code.DATA_LOSS, "slice 1")


def test_an_argument_that_another_launch_still_needs_is_not_given_away(bench: Bench) -> None:
    bench.store.set(1, Part.expected(bench.home, (4,)))
    bench.store.set(2, bench.part([1, 1, 1, 1]))
    bench.run(bench.program(TWO_RESULTS), [1, 2], [3, 4])
    bench.run(bench.program(DONATING), [2], [5])
    assert len(bench.spawned) == 2
    first, second = bench.spawned
    bench.spawned.clear()
    threads = [threading.Thread(target=work) for work in (second, first)]
    threads[0].start()
    threads[0].join(0.05)
    assert threads[0].is_alive()
    bench.store.get(1).resolve(bench.part([1, 2, 3, 4]))
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert bench.values(3) == [[2, 3, 4, 5]]
    assert bench.values(5) == [[2, 2, 2, 2]]


def test_an_argument_that_is_being_read_is_not_given_away(bench: Bench) -> None:
    bench.store.set(1, bench.part([1, 1, 1, 1]))
    reading = bench.store.get(1).read()
    bench.run(bench.program(DONATING), [1], [2])
    (work,) = bench.spawned
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    assert bench.values(1) == [[1, 1, 1, 1]]
    reading.set()
    thread.join(20)
    assert bench.values(2) == [[2, 2, 2, 2]]
    bench.spawned.clear()
    bench.run(bench.program(DONATING), [2], [3])
    assert not bench.spawned


def test_large_values_that_are_asked_for_before_they_are_given_away(
    host: HostRig, compiler: Compiler
) -> None:
    """A snapshot to another slice, and then the step that is given the state."""
    program = host.load(compiler, DONATING.replace("4xf32", "50000xf32"))
    value = np.arange(50_000, dtype=np.float32)
    current = host.put(value)
    for step in range(20):
        source, result = host.aid(), host.aid()
        rid, ready = 5000 + 2 * step, 5001 + 2 * step
        host.tell(
            c.Copy(source, [(current, 0)], [4], "device"),
            c.Get(rid, source, 0, None, None, None),
            c.Ready(ready, [source]),
            c.Execute(step + 1, program, [source], [result], 0),
            c.Free([source, current]),
        )
        answer = host.reports.answer(rid)
        assert isinstance(answer, c.Reply), answer
        assert answer.value == (value + step).tobytes()
        assert isinstance(host.reports.answer(ready), c.Reply)
        current = result
    assert np.frombuffer(host.get(current), np.float32)[:2].tolist() == [20, 21]


def test_a_program_that_is_not_loaded(host: HostRig) -> None:
    (result,) = host.execute(99, host.put(np.zeros(4, np.float32)))
    answer = host.ready(result)
    assert isinstance(answer, c.Failed)
    assert answer.message == "program 99 is not loaded"
    assert F32 == 11
