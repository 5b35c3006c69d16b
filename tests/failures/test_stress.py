"""Many faults at random moments, while a training loop runs on over what is left."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import failure_links as links
import pytest

from regrow import LocalCluster
from regrow.processes import marked

FAULTS = int(os.environ.get("REGROW_TEST_FAULTS", "60"))
SEED = int(os.environ.get("REGROW_TEST_SEED", "1"))
SCRIPT = Path(__file__).with_name("failure_training.py")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGHUP}
KINDS = ["kill"] * 5 + ["stop"] * 3 + ["exit", "links", "two"]
RECOVERY_S = 25.0


class Trainer:
    """The training process, and what it has told."""

    def __init__(self, cluster: LocalCluster, stop: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: list[int] = []
        self._stop = stop
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(stop)],
            env=os.environ | cluster.env | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self.live = event.get("grow", event.get("live", self.live))
            self.events.append(event)

    def wait(self, what: str, condition: Callable[[], Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self._process.poll() is None, f"the client has ended: {self._process.poll()}"
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}: {self.told()}"
            time.sleep(0.005)
        return found

    def told(self) -> list[dict[str, Any]]:
        return self.events[-4:]

    def first(self, name: str, since: float) -> float | None:
        return next((e[name] for e in self.events if e.get(name, 0) > since), None)

    def wrong(self) -> list[str]:
        return [event["wrong"] for event in self.events if "wrong" in event]

    def close(self) -> int:
        """Ends it; how many steps it has made."""
        self._stop.touch()
        try:
            assert self._process.wait(RECOVERY_S) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
        return int(self.events[-1]["done"])


def strike(cluster: LocalCluster, kind: str, victims: Sequence[int]) -> None:
    pids = {one.index: one.pids for one in cluster.slices}
    if kind == "links":
        others = [pid for index, ps in pids.items() if index != victims[0] for pid in ps]
        sum(links.cut_tcp_between(pid, others) for pid in pids[victims[0]])
        return
    for victim in victims:
        for pid in pids[victim]:
            os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
        time.sleep(random.random() * 0.05)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        3,
        2,
        home=tmp_path,
        hang_after_s=1.0,
        reconnect_s=1.0,
        restore_after=0.3,
        log_dir=os.environ.get("REGROW_TEST_LOGS"),
    ) as made:
        run_id = made._supervisor.state.run_id
        yield made
    assert not marked(run_id)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_training_survives_faults_at_random(cluster: LocalCluster, tmp_path: Path) -> None:
    generator = random.Random(SEED)
    trainer = Trainer(cluster, tmp_path / "stop")
    to_error, to_step = [], []
    try:
        for number in range(FAULTS):
            trainer.wait("two slices", lambda: len(trainer.live) > 1, 60)
            time.sleep(generator.random())
            kind = generator.choice(KINDS)
            victims = generator.sample(
                trainer.live, 2 if kind == "two" and len(trainer.live) > 2 else 1
            )
            at = time.monotonic()
            strike(cluster, kind, victims)
            if kind == "links":
                time.sleep(0.5)  # They may have been idle or not there.
                continue
            error = trainer.wait(
                "an error", functools.partial(trainer.first, "error", at), RECOVERY_S
            )
            step = trainer.wait(
                "a step", functools.partial(trainer.first, "step", error), RECOVERY_S
            )
            print(
                f"{number} {kind} {victims}: error {error - at:.3f} s, step {step - at:.3f} s",
                flush=True,
            )
            if kind in ("kill", "exit"):
                to_error.append(error - at)
                to_step.append(step - at)
            if generator.random() < 0.5:
                trainer.wait("all slices", lambda: len(trainer.live) == 3, 60)
        assert not trainer.wrong()
    finally:
        steps = trainer.close()
    for what, times in (("kill to DATA_LOSS", to_error), ("kill to first step", to_step)):
        median, p90 = statistics.median(times), statistics.quantiles(times, n=10)[-1]
        print(f"{what}: median {median:.3f} s, p90 {p90:.3f} s, most {max(times):.3f} s")
    print(f"{steps} steps")
