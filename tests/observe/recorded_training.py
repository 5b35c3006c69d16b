"""A recorded training, as the head tells `Run` of it."""

from __future__ import annotations

import pytest

from regrow.observe import Report, Run


class Training:
    """A client that trains: a step takes 1 s, and 0.1 s lie between two."""

    def __init__(self, tells: bool = True) -> None:
        self.reports: list[Report] = []
        self.run = Run(0.0, self.reports.append)
        self.tells = tells
        self.now = 0.0
        self.run.slices_up(self.pass_s(2))
        self.run.clients(1, self.pass_s(1))
        self.program = self.run.steps.program("jit_train_step", 10_000, small=False)

    def pass_s(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    def compile(self, took_s: float = 3.0) -> None:
        activity = self.run.begin("compile", self.now)
        self.run.end(activity, self.pass_s(took_s))

    def begin(self, step: int, slices: tuple[int, ...] = (0, 1)):
        if self.tells:
            self.run.told(step, "step", self.now)
        if self.run.returned:
            self.run.uses(slices, self.now, self.now)
        is_step = self.run.launched(self.program, self.now, step if self.tells else None)
        followed = None
        if self.run.event is not None:
            kind = "step" if is_step else "run"
            followed = self.run.begin(kind, self.now, slices=slices)
        return self.run.begin("wait", self.now, slices=slices), followed

    def step(self, step: int, slices: tuple[int, ...] = (0, 1)) -> None:
        wait, followed = self.begin(step, slices)
        self.pass_s(1)
        if followed is not None:
            self.run.end(followed, self.now)
        self.run.waited(wait, self.now, failed=False, for_all=True)
        self.pass_s(0.1)

    def save(self) -> None:
        number = self.run.steps.number
        wait = self.run.begin("snapshot", self.now)
        self.run.waited(wait, self.pass_s(0.2), failed=False, for_all=False)
        self.run.steps.saved(number)

    def lose(self, index: int = 1, since: float | None = None, wait=None) -> None:
        self.run.slice_lost(index, "host 0 was ended by SIGKILL", since or self.now, self.now)
        if wait is not None:
            self.run.waited(wait, self.pass_s(0.1), failed=True, for_all=False)

    def load(self, took_s: float = 2.0) -> None:
        activity = self.run.begin("load", self.now)
        self.run.end(activity, self.pass_s(took_s))

    def spent(self, bucket: str) -> float:
        return self.run.ledger.spent(bucket, self.now)

    def check(self) -> None:
        """What must hold at any time."""
        status = self.run.status(self.now)
        assert sum(status["buckets"].values()) == pytest.approx(status["elapsed_s"])
        assert min(status["buckets"].values()) >= -1e-9
        for event in status["events"]:
            parts = sum(event["parts"].values()) - event["overlap_s"] + event["rest_s"]
            assert parts == pytest.approx(event["wall_s"])


def trained(steps: int = 10, **options) -> Training:
    training = Training(**options)
    training.pass_s(1)
    training.compile()
    for step in range(steps):
        training.step(step)
    return training
