"""A training under faults: what each costs, and what part of the time it makes progress."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import harness

from regrow import LocalCluster

RESTORE_AFTER_S = 2.0
_WARM_STEPS = 30
_START_S = 300.0


@dataclass(frozen=True)
class Run:
    """What became of a training.

    Attributes:
        step_s: The median time of a step, in seconds.
        progress: The steps that count at the end, of those that would have been taken without faults.
        lost_s: The time that a fault cost, on average, in seconds.
        back_s: For each fault the time from the kill to the next step that ended, in seconds.
        seconds: How long it was watched.
    """

    step_s: float
    progress: float
    lost_s: float
    back_s: tuple[float, ...]
    seconds: float


class _Trainer:
    """The training process; it is started again when it ends with an error."""

    def __init__(self, how: str, folder: str, env: dict[str, str]) -> None:
        self.steps: list[tuple[int, float]] = []
        self._command = [sys.executable, str(harness.PROGRAMS / "faulty_training.py"), how, folder]
        self._env = env
        self._ending = False
        self._process = self._started()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, env=self._env, stdout=subprocess.PIPE, text=True)

    def _read(self) -> None:
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                step, at = line.split()
                self.steps.append((int(step), float(at)))
            self._process.wait()
            if self._ending:
                return
            self._process = self._started()

    def wait(self, steps: int) -> None:
        deadline = time.monotonic() + _START_S
        while len(self.steps) < steps:
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {_START_S:g} s for {steps} steps: {len(self.steps)}")
            time.sleep(0.01)

    def close(self) -> None:
        self._ending = True
        self._process.kill()
        self._thread.join()


def run_with_faults(how: str, faults_s: Sequence[float], seconds: float) -> Run:
    """Trains, kills a slice at each of these times, and watches for so long, from a warm start on."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(slices=3, devices_per_slice=2, restore_after=RESTORE_AFTER_S) as cluster,
    ):
        trainer = _Trainer(how, folder, harness.cluster_environ(cluster.env))
        try:
            trainer.wait(_WARM_STEPS)
            began, kills = time.monotonic(), []
            for number, after_s in enumerate(faults_s):
                time.sleep(max(0.0, began + after_s - time.monotonic()))
                kills.append(time.monotonic())
                cluster.kill(1 + number % 2)
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            steps = list(trainer.steps)
        finally:
            trainer.close()
    return _judged(steps, kills, began, seconds)


def _judged(
    steps: Sequence[tuple[int, float]], kills: Sequence[float], began: float, seconds: float
) -> Run:
    pairs = itertools.pairwise(steps)
    step_s = statistics.median(at - last for (one, last), (two, at) in pairs if two == one + 1)
    last = max(one for one, at in steps if at <= began + seconds)
    taken = last - max(one for one, at in steps if at < began)
    back = tuple(
        min((at for _, at in steps if at > kill + 0.05), default=began + seconds) - kill
        for kill in kills
    )
    return Run(
        step_s, taken * step_s / seconds, (seconds - taken * step_s) / len(kills), back, seconds
    )
