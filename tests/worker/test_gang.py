"""Two hosts in one epoch; one is killed, and the other goes on."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from acting_process import ActingProcess
from coordination_rig import open_service
from worker_rig import F32, compile_program, options_of

from regrow.channel import commands as c
from regrow.errors import Code
from regrow.worker.compiler import Compiler
from regrow.worker.gang import Gang
from regrow.worker.launch import Launcher
from regrow.worker.platform import Domain
from regrow.worker.store import PartError, Store
from waiting import until

MEMBER = Path(__file__).with_name("gang_member.py")
LOSS = "slice 1 was lost: SIGKILL"
# XLA itself waits for its peers for 30 seconds at the least.
STUCK_S = 25.0
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


class Member(ActingProcess):
    """A host in a process of its own."""

    def __init__(self, index: int) -> None:
        super().__init__(MEMBER, str(index))

    def do(self, *act: Any) -> Any:
        self.begin(*act)
        return self.end()


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


def form(members: list[Member], epoch: int, address: Any) -> list[int]:
    devices = [[index] for index in range(len(members))]
    for node, member in enumerate(members):
        member.begin("form", epoch, node, devices, address)
    for member in members:
        member.end()
    return both(members, "formed", epoch)


def load(members: list[Member], compiler: Compiler, epoch: int, number: int, size: int = 2) -> None:
    devices = list(range(len(members)))
    text = SUM.replace("tensor<2x", f"tensor<{size}x")
    blob = compile_program(compiler, text, 2, spans=True)["blob"].hex()
    options = options_of(2).hex()
    both(members, "load", number, blob, options, devices, [[F32, []]], epoch)


@pytest.mark.timeout(100)
def test_a_member_is_killed_and_the_survivor_goes_on(
    members: list[Member], compiler: Compiler
) -> None:
    survivor, victim = members
    address, service = open_service(2)
    ports = form(members, 1, address)
    assert all(ports)
    load(members, compiler, 1, 100)
    survivor.do("put", 1, [3])
    victim.do("put", 1, [4])
    both(members, "execute", 1, 100, [1], [2])
    assert both(members, "get", 2) == [["value", [7]], ["value", [7]]]
    # The victim is killed; the survivor enters a collective that will never end.
    victim.kill()
    survivor.do("execute", 2, 100, [1], [3])
    question = survivor.do("ask", 3)
    time.sleep(0.1)
    started = time.monotonic()
    survivor.do("fail", 1, LOSS, ports)
    kind, code, message, epoch = survivor.do("answer", question)
    assert time.monotonic() - started < STUCK_S
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
    address, service = open_service(2)
    form(pair, 2, address)
    load(pair, compiler, 2, 101)
    newcomer.do("put", 1, [5])
    both(pair, "execute", 4, 101, [1], [5])
    assert both(pair, "get", 5) == [["value", [8]], ["value", [8]]]
    service.shutdown()


@pytest.mark.parametrize("size", [2, 1 << 14], ids=["inline", "not inline"])
@pytest.mark.timeout(100)
def test_nobody_waits_for_a_launch_that_xla_is_stuck_in(
    members: list[Member], compiler: Compiler, size: int
) -> None:
    one, other = members
    address, service = open_service(2)
    ports = form(members, 1, address)
    load(members, compiler, 1, 100, size)
    both(members, "put", 1, [1] * (size // 2))
    # The other never launches: this one waits for it, for half a minute and deaf to cut links.
    one.do("execute", 1, 100, [1], [2], 3)
    one.do("copy", 4, 2)
    questions = [one.do("ask", 2), one.do("ask_ready", 3), one.do("ask", 4)]
    time.sleep(0.2)
    started = time.monotonic()
    one.do("fail", 1, LOSS, ports)
    one.do("execute", 2, 100, [1], [5])
    questions += [one.do("ask", 5), one.do("ask", 1)]
    answers = [one.do("answer", question) for question in questions]
    assert time.monotonic() - started < STUCK_S
    assert answers[:3] == [["error", Code.DATA_LOSS, LOSS, 1]] * 3
    assert answers[3] == ["error", Code.DATA_LOSS, "epoch 1 has ended", 1]
    assert answers[4][0] == "value"
    # The news comes to the other later; what it launches meanwhile fails as well.
    other.do("fail", 1, LOSS, ports)
    other.do("execute", 1, 100, [1], [2])
    assert other.do("get", 2)[:2] == ["error", Code.DATA_LOSS]
    assert both(members, "get", 1) == [["value", [1] * (size // 2)]] * 2
    service.shutdown()


@pytest.mark.timeout(100)
def test_a_member_that_never_comes_does_not_delay_the_next_epoch(
    members: list[Member], compiler: Compiler
) -> None:
    one, _ = members
    address, service = open_service(2)
    one.do("form", 1, 0, [[0], [1]], address)
    time.sleep(0.5)  # It is in the midst of it.
    one.do("fail", 1, LOSS, [])
    started = time.monotonic()
    following, other_service = open_service(2)
    form(members, 2, following)
    assert time.monotonic() - started < STUCK_S
    load(members, compiler, 2, 100)
    both(members, "put", 1, [1])
    both(members, "execute", 1, 100, [1], [2])
    assert both(members, "get", 2) == [["value", [2]], ["value", [2]]]
    other_service.shutdown()
    service.shutdown()


@pytest.mark.timeout(100)
def test_epochs_that_end_at_the_same_time_leave_nothing(members: list[Member]) -> None:
    for epoch in (1, 2, 3, 4):
        address, service = open_service(2)
        ports = form(members, epoch, address)
        if epoch < 4:
            for member in members:
                member.do("fail", epoch, LOSS, ports)
            service.shutdown()
    until(lambda: both(members, "ports") == [1, 1], "the end of the clients of ended epochs")
    service.shutdown()


# --- without peers --------------------------------------------------------------------------------


class Bench:
    """A gang that never meets anybody, and what it reports."""

    def __init__(self) -> None:
        self.formed: list[tuple[int, int]] = []
        self.broken: list[c.EpochBroken] = []
        self.told = threading.Event()
        self.where = ("unix:/nowhere/epochs.sock", 1)

    def gang(self, **how: Any) -> Gang:
        def broken(report: c.EpochBroken) -> None:
            self.broken.append(report)
            self.told.set()

        form = c.FormEpoch(7, 0, ((0,), (1,)), *self.where)
        return Gang(form, 1, "127.0.0.1", lambda *report: self.formed.append(report), broken)


def test_a_gang_that_is_failed_before_it_meets() -> None:
    bench = Bench()
    gang = bench.gang()
    gang.fail(c.FailEpoch(7, LOSS, ()))
    gang.fail(c.FailEpoch(7, "something else", ()))
    for wait in (gang.wait_formed, lambda: gang.enter(1)):
        with pytest.raises(PartError, match=LOSS) as caught:
            wait()
        assert (caught.value.code, caught.value.epoch) == (Code.DATA_LOSS, 7)
    assert not bench.formed
    assert not bench.broken


def test_a_gang_whose_epoch_ends_before_all_are_there() -> None:
    bench = Bench()
    (address, keys), service = open_service(2)
    bench.where = (address, keys[0])
    gang = bench.gang()
    service.close_epoch()
    assert bench.told.wait(30)
    report = bench.broken[0]
    assert (report.epoch, report.launch) == (7, 0)
    assert report.message.startswith("could not join epoch 7: ")
    assert "coordination service of this epoch has closed" in report.message
    with pytest.raises(PartError, match="epoch 7 was not formed"):
        gang.wait_formed()
    service.shutdown()


def test_a_launch_that_could_not_be_made_is_told() -> None:
    bench = Bench()
    gang = bench.gang()
    gang.not_launched(5, PartError(Code.ABORTED, "no such program"))
    assert bench.broken == [c.EpochBroken(7, 5, "no such program", Code.ABORTED)]
    gang.fail(c.FailEpoch(7, LOSS, ()))
    gang.not_launched(6, PartError(Code.ABORTED, "again"))
    assert len(bench.broken) == 1


class Ended:
    """A launch that has ended, well or not."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def block_until_ready(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


class Stuck:
    """A launch that XLA is stuck in: its token tells nothing, also when it has been poisoned."""

    def __init__(self) -> None:
        self.unwound = threading.Event()

    def block_until_ready(self) -> None:
        self.unwound.wait(60)


def watched(gang: Gang) -> Gang:
    """Watches the launches of a gang that has not been formed."""
    threading.Thread(target=gang._watch_launches, daemon=True).start()
    return gang


def test_a_launch_that_xla_is_stuck_in_keeps_nobody_waiting() -> None:
    gang, stuck = watched(Bench().gang()), Stuck()
    gang.enter(1)
    gang.launched(1, stuck, None)
    entered = threading.Thread(target=enter_anyhow, args=(gang, 2))
    entered.start()
    entered.join(0.05)
    assert entered.is_alive()
    gang.fail(c.FailEpoch(7, LOSS, ()))
    entered.join(20)
    assert not entered.is_alive()
    stuck.unwound.set()


def test_a_launch_that_is_made_when_the_epoch_has_failed_keeps_nobody_waiting() -> None:
    gang, stuck = watched(Bench().gang()), Stuck()
    gang.enter(1)
    gang.fail(c.FailEpoch(7, LOSS, ()))
    gang.launched(1, stuck, None)
    with pytest.raises(PartError, match=LOSS):
        gang.enter(2)
    stuck.unwound.set()


def test_a_host_whose_launch_failed_does_not_run_ahead() -> None:
    gang = watched(Bench().gang())
    gang.enter(1)
    gang.launched(1, Ended(), None)
    gang.enter(2)
    gang.launched(2, Ended("its own fault"), None)
    # Its peers may be waiting in the second one: a third would meet them there.
    with pytest.raises(PartError, match="epoch 7 has ended") as caught:
        gang.enter(3)
    assert caught.value.epoch == 7
    gang.fail(c.FailEpoch(7, LOSS, (), 2, Code.ABORTED, "its own fault"))
    with pytest.raises(PartError, match=LOSS):
        gang.enter(4)


def test_a_host_that_could_not_launch_does_not_run_ahead() -> None:
    bench = Bench()
    gang = bench.gang()
    gang.enter(1)
    gang.not_launched(1, PartError(Code.ABORTED, "no such program"))
    with pytest.raises(PartError, match="epoch 7 has ended") as caught:
        gang.enter(2)
    assert caught.value.epoch == 7


def test_a_launch_waits_until_the_one_before_has_been_made() -> None:
    for ends in ("launched", "not_launched", "fail"):
        gang = watched(Bench().gang())
        gang.enter(1)
        entered = threading.Thread(target=enter_anyhow, args=(gang, 2))
        entered.start()
        entered.join(0.05)
        assert entered.is_alive()
        if ends == "launched":
            gang.launched(1, Ended(), None)
        elif ends == "not_launched":
            gang.not_launched(1, PartError(Code.ABORTED, "no such program"))
        else:
            gang.fail(c.FailEpoch(7, LOSS, ()))
        entered.join(20)
        assert not entered.is_alive()
        gang.fail(c.FailEpoch(7, LOSS, ()))


def enter_anyhow(gang: Gang, launch: int) -> None:
    with contextlib.suppress(PartError):
        gang.enter(launch)


def test_a_launch_that_failed_by_itself_ends_with_its_own_error_where_it_was_not_made() -> None:
    gang = Bench().gang()
    gang.fail(c.FailEpoch(7, LOSS, (), 5, Code.ABORTED, "its own fault"))
    for launch, code, text in ((5, Code.ABORTED, "its own fault"), (6, Code.DATA_LOSS, LOSS)):
        with pytest.raises(PartError) as caught:
            gang.enter(launch)
        assert (caught.value.code, caught.value.message) == (code, text)


def test_a_program_that_the_end_of_its_epoch_overtook_fails_as_what_ended_it(home: Domain) -> None:
    gang = Bench().gang()
    store = Store(home)
    launcher = Launcher(store, lambda run: run())
    store.fail([3], PartError(Code.ABORTED, "its argument's fault"))
    unloaded = PartError(Code.DATA_LOSS, LOSS, 7)
    gang.fail(c.FailEpoch(7, LOSS, (), 5, Code.ABORTED, "its own fault"))
    told = {}
    for out, launch, args in ((10, 5, ()), (11, 6, ()), (12, 6, (3,))):
        launcher.fail_unloaded(c.Execute(launch, 1, args, [out], 0), gang, unloaded)
        told[out] = store.get(out).error
    texts = [error and (error.code, error.message) for error in told.values()]
    assert texts == [
        (Code.ABORTED, "its own fault"),
        (Code.DATA_LOSS, LOSS),
        (Code.ABORTED, "its argument's fault"),
    ]


@pytest.mark.parametrize(
    ("error", "code", "cause"),
    [
        (PartError(Code.ABORTED, "text"), Code.ABORTED, 0),
        (PartError(Code.UNKNOWN, "text", 7), 0, 0),
        (PartError(Code.UNKNOWN, "text", 6), Code.UNKNOWN, 6),
    ],
    ids=["own", "of this epoch", "of another epoch"],
)
def test_why_a_launch_was_not_made(error: PartError, code: int, cause: int) -> None:
    bench = Bench()
    bench.gang().not_launched(5, error)
    assert bench.broken == [c.EpochBroken(7, 5, "text", code, cause)]


def test_a_link_that_goes_down_under_a_launch_is_told() -> None:
    bench = Bench()
    gang = bench.gang()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        gang._port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", gang._port)):
            accepted, _ = listening.accept()
            gang.count_links()
            assert gang._linked()
            assert not bench.broken
            accepted.close()
            assert not gang._linked()
    assert bench.broken == [c.EpochBroken(7, 0, "a link of epoch 7 is down")]
    gang.fail(c.FailEpoch(7, LOSS, ()))


def test_a_result_that_is_donated_while_it_is_looked_at_is_no_failure() -> None:
    bench = Bench()
    result = jax.device_put(np.zeros(2, np.float32))
    result.delete()
    assert bench.gang()._error_of(1, result) is None
    assert bench.broken == []
