"""Two hosts in one epoch; one is killed, and the other goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_rig import F32, compile_program, options_of

from regrow.channel import commands as c
from regrow.errors import Code
from regrow.worker import gang as gangs
from regrow.worker.compiler import Compiler
from regrow.worker.coordinator import open_service
from regrow.worker.gang import Gang
from regrow.worker.store import PartError

MEMBER = Path(__file__).with_name("gang_member.py")
SOURCES = str(Path(gangs.__file__).parents[2])
LOSS = "slice 1 was lost: SIGKILL"
SUM = """
module @sum attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%a: tensor<2xf32> {mhlo.sharding = "{devices=[2]<=[2]}"})
      -> (tensor<f32> {mhlo.sharding = "{replicated}"}) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %total = stablehlo.reduce(%a init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<2xf32>, tensor<f32>) -> tensor<f32>
    return %total : tensor<f32>
  }
}
"""


class Member:
    """A host in a process of its own."""

    def __init__(self, index: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), str(index)],
            env=os.environ | {"PYTHONPATH": SOURCES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def begin(self, *act: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(act) + "\n")
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):  # Gloo, too, writes there.
                return json.loads(line[1:])
        raise AssertionError(f"the member has ended: {self.process.wait()}")

    def do(self, *act: Any) -> Any:
        self.begin(*act)
        return self.end()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    made = [Member(0), Member(1)]
    yield made
    for member in made:
        member.close()


def both(members: list[Member], *act: Any) -> list[Any]:
    """Lets several do the same at the same time."""
    for member in members:
        member.begin(*act)
    return [member.end() for member in members]


def form(members: list[Member], epoch: int, address: str) -> list[int]:
    devices = [[index] for index in range(len(members))]
    for node, member in enumerate(members):
        member.begin("form", epoch, node, devices, address)
    for member in members:
        member.end()
    return both(members, "formed", epoch)


def load(members: list[Member], compiler: Compiler, epoch: int, number: int) -> None:
    devices = list(range(len(members)))
    blob = compile_program(compiler, SUM, 2, spans=True)["blob"].hex()
    options = options_of(2).hex()
    both(members, "load", number, blob, options, devices, [[F32, []]], epoch)


@pytest.mark.timeout(100)
def test_a_member_is_killed_and_the_survivor_goes_on(
    members: list[Member], compiler: Compiler
) -> None:
    survivor, victim = members
    address, service = open_service("127.0.0.1", 2)
    ports = form(members, 1, address)
    assert all(ports)
    load(members, compiler, 1, 100)
    survivor.do("put", 1, [3])
    victim.do("put", 1, [4])
    both(members, "execute", 1, 100, [1], [2])
    assert both(members, "get", 2) == [["value", [7]], ["value", [7]]]
    # The victim is killed; the survivor enters a collective that will never end.
    victim.process.kill()
    victim.process.wait()
    survivor.do("execute", 2, 100, [1], [3])
    question = survivor.do("ask", 3)
    time.sleep(0.1)
    started = time.monotonic()
    survivor.do("fail", 1, LOSS, ports)
    kind, code, message, epoch = survivor.do("answer", question)
    assert time.monotonic() - started < 1.0
    # If the broken link was seen first, the head gives its verdict on that.
    assert kind == "error"
    assert epoch == 1
    assert LOSS in message or code != Code.DATA_LOSS
    # What it had is still there.
    assert survivor.do("get", 2) == ["value", [7]]
    assert survivor.do("get", 1) == ["value", [3]]
    # A program of the old epoch is refused, with the epoch.
    survivor.do("execute", 3, 100, [1], [4])
    assert survivor.do("get", 4)[3] == 1
    service.shutdown()
    # The next epoch, with a newcomer.
    newcomer = Member(1)
    members.append(newcomer)
    pair = [survivor, newcomer]
    address, service = open_service("127.0.0.1", 2)
    form(pair, 2, address)
    load(pair, compiler, 2, 101)
    newcomer.do("put", 1, [5])
    both(pair, "execute", 4, 101, [1], [5])
    assert both(pair, "get", 5) == [["value", [8]], ["value", [8]]]
    service.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_an_epoch_that_fails_while_a_program_runs_poisons_it(
    members: list[Member], compiler: Compiler
) -> None:
    one, other = members
    address, service = open_service("127.0.0.1", 2)
    ports = form(members, 1, address)
    load(members, compiler, 1, 100)
    both(members, "put", 1, [1])
    # The other never launches: this one waits in the collective, all links being well.
    one.do("execute", 1, 100, [1], [2])
    question = one.do("ask", 2)
    time.sleep(0.2)
    started = time.monotonic()
    one.do("fail", 1, LOSS, ports)
    kind, _, message, epoch = one.do("answer", question)
    assert time.monotonic() - started < 1.0
    # The poison, or the cut link: with the epoch in it the head tells its verdict anyhow.
    assert (kind, epoch) == ("error", 1)
    assert message == LOSS or "Gloo" in message or "gloo" in message
    # The news comes to the other later; what it launches meanwhile fails as well.
    other.do("fail", 1, LOSS, ports)
    other.do("execute", 1, 100, [1], [2])
    assert other.do("get", 2)[:2] == ["error", Code.DATA_LOSS]
    assert both(members, "get", 1) == [["value", [1]], ["value", [1]]]
    service.shutdown()


# --- without peers --------------------------------------------------------------------------------


class Bench:
    """A gang that never meets anybody, and what it reports."""

    def __init__(self) -> None:
        self.formed: list[tuple[int, int]] = []
        self.broken: list[tuple[int, int, str]] = []
        self.told = threading.Event()

    def gang(self, **how: Any) -> Gang:
        def broken(*report: Any) -> None:
            self.broken.append(report)
            self.told.set()

        form = c.FormEpoch(7, 0, ((0,), (1,)))
        return Gang(form, 1, "127.0.0.1", lambda *report: self.formed.append(report), broken)


def test_a_gang_that_is_failed_before_it_meets() -> None:
    bench = Bench()
    gang = bench.gang()
    gang.fail(LOSS, [])
    gang.fail("something else", [])
    for wait in (gang.wait_formed, lambda: gang.enter(1)):
        with pytest.raises(PartError, match=LOSS) as caught:
            wait()
        assert (caught.value.code, caught.value.epoch) == (Code.DATA_LOSS, 7)
    gang.meet_at("127.0.0.1:1")
    assert not bench.formed
    assert not bench.broken


def test_a_gang_that_hears_of_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "_CONNECT_S", 0.05)
    bench = Bench()
    gang = bench.gang()
    assert bench.told.wait(10)
    ((epoch, launch, text),) = bench.broken
    assert (epoch, launch) == (7, 0)
    assert text.startswith("could not join epoch 7: ")
    assert "the address of epoch 7" in text
    with pytest.raises(PartError, match="epoch 7 was not formed"):
        gang.wait_formed()


def test_a_launch_that_could_not_be_made_is_told() -> None:
    bench = Bench()
    gang = bench.gang()
    gang.not_launched(5, PartError(Code.ABORTED, "no such program"))
    assert bench.broken == [(7, 5, "no such program")]
    gang.fail(LOSS, [])
    gang.not_launched(6, PartError(Code.ABORTED, "again"))
    assert len(bench.broken) == 1
