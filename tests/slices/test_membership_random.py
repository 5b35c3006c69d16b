"""The membership under random events: what must hold whatever comes, in whatever order."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from regrow.errors import SLICE_DOWN_WORDS
from regrow.slices import (
    HELD,
    Action,
    ContHosts,
    ContRequested,
    EndHost,
    Event,
    Fence,
    Fenced,
    Heartbeat,
    HostConnected,
    HostDisconnected,
    HostExited,
    HostReady,
    HostReported,
    HostStarted,
    HostStartFailed,
    JobEnds,
    KillRequested,
    Leave,
    Membership,
    Policy,
    RestoreRequested,
    Resumed,
    ResumeFailed,
    ResumeRequested,
    ShutdownRequested,
    SliceLost,
    SliceUp,
    StartHost,
    StartRequested,
    StateSaved,
    StopHosts,
    StopRequested,
    Suspended,
    SuspendFailed,
)

HOSTS = [1, 2, 1]
INDEX = st.integers(0, len(HOSTS) - 1)
HOST = st.integers(0, 1)
Key = tuple[int, int]


@dataclass
class Process:
    """A process in the world, whether or not the membership has heard of it."""

    pid: int
    connected: bool = False


class Random(RuleBasedStateMachine):
    """A world that is slow, lossy and disobedient, and a judge of every action."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pid = 0
        self.asked: set[tuple[int, int, int]] = set()
        self.alive: dict[tuple[int, int, int], Process] = {}
        self.fences: set[Key] = set()
        # What the judge remembers.
        self.begun: dict[int, int] = dict.fromkeys(range(len(HOSTS)), 0)
        self.started: set[tuple[int, int, int]] = set()
        self.ups: set[Key] = set()
        self.losses: dict[Key, float] = {}
        self.fenced: set[Key] = set()
        self.left: dict[Key, float] = {}
        self.stored: set[int] = set()
        self.saved: dict[int, int] = {}
        self.ended = False
        self.down = False

    @initialize(restore=st.sampled_from([None, 0.0, 1.0]), budget=st.sampled_from([None, 0, 1, 2]))
    def begin(self, restore: float | None, budget: int | None) -> None:
        self.policy = Policy(restore_after_s=restore, num_elastic_instances=budget)
        self.membership = Membership(HOSTS, self.policy)
        self.do(StartRequested())

    # --- the judge ---

    def do(self, event: Event) -> None:
        stale = isinstance(event, Heartbeat | HostReady | HostConnected | HostDisconnected) and (
            (event.index, event.incarnation) in self.losses
        )
        actions = self.membership.handle(event, self.now)
        assert not (stale and actions)
        self.judge(actions)

    def judge(self, actions: tuple[Action, ...]) -> None:
        expected_fences: list[Key] = []
        for action in actions:
            match action:
                case StartHost(index, incarnation, host):
                    self.judge_start(index, incarnation, host)
                case SliceUp(index, incarnation):
                    self.judge_current(index, incarnation)
                    assert (index, incarnation) not in self.ups
                    self.ups.add((index, incarnation))
                case SliceLost(index, incarnation, _, was_up):
                    self.judge_current(index, incarnation)
                    assert self.saved.get(index) != incarnation
                    up = (index, incarnation) in self.ups
                    assert was_up == (up and index not in self.stored)
                    self.losses[index, incarnation] = self.now
                    expected_fences.append((index, incarnation))
                case Leave(index, incarnation):
                    self.judge_current(index, incarnation)
                    key = (index, incarnation)
                    assert key not in self.left
                    self.left[key] = self.now
                    self.fenced.add(key)
                    self.fences.add(key)
                case Fence(index, incarnation):
                    key = (index, incarnation)
                    assert key not in self.fenced or (self.down and key in self.left)
                    assert self.down or expected_fences.pop() == key
                    self.fenced.add(key)
                    self.fences.add(key)
                case EndHost(index, incarnation, host, pid):
                    assert (index, incarnation) in self.fenced
                    assert self.alive[index, incarnation, host].pid == pid
                    del self.alive[index, incarnation, host]
                case StopHosts(index, incarnation) | ContHosts(index, incarnation):
                    self.judge_current(index, incarnation)
                case JobEnds():
                    assert not self.ended
                    self.ended = True
        assert not expected_fences

    def judge_current(self, index: int, incarnation: int) -> None:
        assert not self.down
        assert incarnation == self.begun[index]
        assert (index, incarnation) not in self.losses
        assert (index, incarnation) not in self.left

    def judge_start(self, index: int, incarnation: int, host: int) -> None:
        assert not self.ended
        assert not self.down
        assert (index, incarnation, host) not in self.started
        if incarnation != self.begun[index]:
            former = (index, self.begun[index])
            assert incarnation == former[1] + 1
            if former[1]:
                assert former in self.fenced
                left = [key for key in self.alive if key[:2] == former]
                ended = self.losses.get(former, self.left.get(former, self.now))
                late = self.now >= ended + self.policy.fence_s
                assert former not in self.fences or not left or late
            self.begun[index] = incarnation
        self.started.add((index, incarnation, host))
        self.asked.add((index, incarnation, host))

    # --- the world ---

    def pick(self, choices: list[tuple[int, int, int]], number: int) -> tuple[int, int, int]:
        return sorted(choices)[number % len(choices)]

    @precondition(lambda self: self.asked)
    @rule(number=st.integers(0, 99), works=st.sampled_from([True, True, True, False]))
    def launch(self, number: int, works: bool) -> None:
        key = self.pick(list(self.asked), number)
        self.asked.remove(key)
        if not works:
            self.do(HostStartFailed(*key, "no memory"))
            return
        self.pid += 1
        self.alive[key] = Process(self.pid)
        self.do(HostStarted(*key, self.pid))

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 99))
    def connect(self, number: int) -> None:
        key = self.pick(list(self.alive), number)
        self.alive[key].connected = True
        self.do(HostConnected(*key))
        self.do(HostReady(*key))

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 99))
    def disconnect(self, number: int) -> None:
        key = self.pick(list(self.alive), number)
        self.alive[key].connected = False
        self.do(HostDisconnected(*key))

    @precondition(lambda self: self.alive)
    @rule(number=st.integers(0, 99))
    def exit(self, number: int) -> None:
        key = self.pick(list(self.alive), number)
        del self.alive[key]
        self.do(HostExited(*key, "SIGKILL (signal 9)"))

    @rule()
    def beat(self) -> None:
        for key, process in list(self.alive.items()):
            if process.connected and key in self.alive:
                self.do(Heartbeat(*key))

    @precondition(lambda self: self.fences)
    @rule(number=st.integers(0, 99))
    def fence(self, number: int) -> None:
        key = sorted(self.fences)[number % len(self.fences)]
        self.end_all(key)

    def end_all(self, key: Key) -> None:
        self.fences.remove(key)
        for process in [one for one in self.alive if one[:2] == key]:
            del self.alive[process]
        self.asked = {one for one in self.asked if one[:2] != key}
        self.do(Fenced(*key))

    @rule(duration_s=st.sampled_from([0.01, 0.5, 1.0, 2.6, 3.0, 5.0, 10.0, 61.0]))
    def wait(self, duration_s: float) -> None:
        end = self.now + duration_s
        for _ in range(1000):
            due = self.membership.deadline()
            self.now = end if due is None else max(self.now, min(due, end))
            self.judge(self.membership.tick(self.now))
            later = self.membership.deadline()
            assert later is None or later > self.now, "a tick that leaves itself due spins"
            if self.now >= end:
                return
        raise AssertionError("time does not pass")

    @rule(gap_s=st.sampled_from([1.0, 30.0, 100.0]))
    def stand_still(self, gap_s: float) -> None:
        # Only a wait for a return, which nobody is blamed for, may be over afterwards.
        self.now += gap_s
        self.membership.clock_jumped(self.now, gap_s)
        actions = self.membership.tick(self.now)
        assert all(isinstance(action, StartHost) for action in actions)
        self.judge(actions)

    # --- operators and strangers ---

    @rule(index=INDEX)
    def kill(self, index: int) -> None:
        self.saved.pop(index, None)
        self.do(KillRequested(index))

    @rule(index=INDEX)
    def restore(self, index: int) -> None:
        refused = self.membership.refusal(RestoreRequested(index)) is not None
        before = self.membership.info(index)
        self.do(RestoreRequested(index))
        idle = before.state in HELD or before.state == "suspended"
        assert refused == (idle or self.down or self.ended)
        if refused:
            assert self.membership.info(index) == before

    @rule(index=INDEX)
    def suspend(self, index: int) -> None:
        live = index in self.membership.live()
        if live:
            self.stored.add(index)
        self.saved.pop(index, None)
        before = self.membership.info(index)
        self.do(Suspended(index, "a notice"))
        assert live or self.membership.info(index) == before

    @rule(index=INDEX)
    def save(self, index: int) -> None:
        if index in self.membership.live():
            self.saved[index] = self.begun[index]
        self.do(StateSaved(index))

    @rule(index=INDEX)
    def fail_to_suspend(self, index: int) -> None:
        self.saved.pop(index, None)
        self.do(SuspendFailed(index))

    @rule(index=INDEX)
    def resume(self, index: int) -> None:
        self.do(ResumeRequested(index))

    @rule(index=INDEX, works=st.booleans())
    def give_back(self, index: int, works: bool) -> None:
        if works and index in self.membership.live():
            self.stored.discard(index)
        if not works:
            self.saved.pop(index, None)
        self.do(Resumed(index) if works else ResumeFailed(index, "a damaged chunk"))
        if not works and index in self.stored and not self.down:
            assert self.membership.info(index).state == "suspended"

    @rule(index=INDEX, stop=st.booleans())
    def signal(self, index: int, stop: bool) -> None:
        self.do(StopRequested(index) if stop else ContRequested(index))

    @rule(
        index=INDEX,
        host=HOST,
        back=st.integers(-1, 3).filter(bool),
        kind=st.sampled_from([Heartbeat, HostConnected, HostReady, HostDisconnected]),
    )
    def stale(
        self,
        index: int,
        host: int,
        back: int,
        kind: type[Heartbeat | HostConnected | HostReady | HostDisconnected],
    ) -> None:
        before = self.membership.info(index)
        event = kind(index, self.begun[index] - back, min(host, HOSTS[index] - 1))
        assert self.membership.handle(event, self.now) == ()
        assert self.membership.info(index) == before

    @rule(index=INDEX)
    def report(self, index: int) -> None:
        self.do(HostReported(index, self.begun[index], 0, "fatal", "INTERNAL: fire\nin the hall"))

    @precondition(lambda self: len(self.losses) > 3)
    @rule()
    def shut_down(self) -> None:
        held = {
            (info.index, info.incarnation) for info in self.membership.infos() if info.state in HELD
        }
        before = set(self.fenced)
        self.down = True
        self.do(ShutdownRequested())
        assert self.fenced - before == held - before

    # --- always ---

    @invariant()
    def is_in_order(self) -> None:
        if not hasattr(self, "membership"):
            return
        self.membership.validate()
        for index, incarnation in self.membership.live().items():
            assert (index, incarnation) in self.ups
            assert (index, incarnation) not in self.losses
        gone = self.membership.status(self.now)["gone"]
        budget = self.policy.num_elastic_instances
        assert budget is None or gone <= budget or self.ended or self.down

    @invariant()
    def speaks_well(self) -> None:
        if not hasattr(self, "membership"):
            return
        json.dumps(self.membership.status(self.now))
        texts = [self.membership.describe_wait(self.now), self.membership.ended or ""]
        for index, incarnation in self.losses:
            text = self.membership.describe_loss(index, incarnation, self.now)
            assert text.startswith(("was lost: ", "did not start: "))
            texts.append(text)
        for text in texts:
            assert text.isprintable()
            assert not any(word in text for word in SLICE_DOWN_WORDS)

    def teardown(self) -> None:
        """When the world obeys again, every slice comes back, unless the job is over."""
        if not hasattr(self, "membership") or self.ended or self.down:
            return
        for index in range(len(HOSTS)):
            self.fail_to_suspend(index)
        for _ in range(20):
            for fence in list(self.fences):
                self.end_all(fence)
            for index in range(len(HOSTS)):
                self.do(RestoreRequested(index))
                self.do(ResumeRequested(index))
            while self.asked:
                self.launch(0, True)
            for key in list(self.alive):
                if key in self.alive and not self.alive[key].connected:
                    self.alive[key].connected = True
                    self.do(HostConnected(*key))
                    self.do(HostReady(*key))
            self.beat()
            self.wait(0.5)
            if self.membership.all_up() or self.ended:
                return
        raise AssertionError(self.membership.describe_wait(self.now))


TestRandom = Random.TestCase
TestRandom.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
