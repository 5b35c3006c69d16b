"""A membership with a fake clock, and a world that does at once what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from regrow.slices import (
    Action,
    EndHost,
    Event,
    Fence,
    Fenced,
    Heartbeat,
    HostConnected,
    HostExited,
    HostReady,
    HostStarted,
    Membership,
    Policy,
    SliceInfo,
    StartHost,
    StartRequested,
)


class World:
    """Feeds a membership and notes every action; `obeys` starts and fences at once."""

    def __init__(self, hosts: list[int], policy: Policy) -> None:
        self.membership = Membership(hosts, policy)
        self.now = 100.0
        self.actions: list[Action] = []
        self.processes: dict[tuple[int, int, int], int] = {}
        self.obeys = True
        self._pid = 1000

    def do(self, event: Event) -> list[Action]:
        """One event, and all that follows from it."""
        return self._follow(self.membership.handle(event, self.now))

    def tick(self) -> list[Action]:
        """Lets the membership look at its deadlines, at the present time."""
        return self._follow(self.membership.tick(self.now))

    def wait(self, duration_s: float, *, beats: tuple[int, ...] = ()) -> list[Action]:
        """Time passes; ticks come when they are due, heartbeats of the given slices each second."""
        end, seen = self.now + duration_s, len(self.actions)
        next_beat = self.now
        while True:
            due = self.membership.deadline()
            at = min(end, next_beat, end if due is None else due)
            self.now = max(self.now, at)
            if self.now >= next_beat:
                next_beat += 1.0
                for index in beats:
                    self.beat(index)
            self.tick()
            if self.now >= end:
                return self.actions[seen:]

    def start(self) -> None:
        """All slices come up."""
        self.do(StartRequested())
        self.come_up()

    def come_up(self, *indices: int) -> None:
        """The hosts of these slices (all) connect and are ready."""
        for index in indices or range(len(self.membership)):
            info = self.info(index)
            for host in info.hosts:
                self.do(HostConnected(index, info.incarnation, host.index))
                self.do(HostReady(index, info.incarnation, host.index))

    def beat(self, index: int) -> None:
        info = self.info(index)
        for host in info.hosts:
            self.do(Heartbeat(index, info.incarnation, host.index))

    def exit(self, index: int, host: int = 0, cause: str = "SIGKILL (signal 9)") -> list[Action]:
        """A process of the current incarnation ends."""
        incarnation = self.info(index).incarnation
        self.processes.pop((index, incarnation, host), None)
        return self.do(HostExited(index, incarnation, host, cause))

    def info(self, index: int) -> SliceInfo:
        return self.membership.info(index)

    def loss(self, index: int, incarnation: int = 1) -> str:
        return self.membership.describe_loss(index, incarnation, self.now)

    def said(self, index: int, text: str) -> bool:
        """Whether the story of a slice has a line with this text."""
        return any(text in line.text for line in self.membership.story(index))

    def of(self, kind: type[Action]) -> list[Any]:
        return [action for action in self.actions if isinstance(action, kind)]

    def _follow(self, actions: tuple[Action, ...]) -> list[Action]:
        seen = len(self.actions)
        self.membership.validate()
        self.actions += actions
        for action in actions:
            if self.obeys:
                self._obey(action)
        return self.actions[seen:]

    def _obey(self, action: Action) -> None:
        match action:
            case StartHost(index, incarnation, host):
                self._pid += 1
                self.processes[index, incarnation, host] = self._pid
                self.do(HostStarted(index, incarnation, host, self._pid))
            case Fence(index, incarnation):
                for key in [key for key in self.processes if key[:2] == (index, incarnation)]:
                    del self.processes[key]
                self.do(Fenced(index, incarnation))
            case EndHost(index, incarnation, host):
                self.processes.pop((index, incarnation, host), None)


@pytest.fixture
def make() -> Callable[..., World]:
    """Makes a world of slices with so many hosts each, all of them up."""

    def build(*hosts: int, started: bool = True, **policy: Any) -> World:
        world = World(list(hosts or (1, 1, 1)), Policy(**policy))
        if started:
            world.start()
        return world

    return build
