"""One cluster and one client for many failures, and the faults that are put to them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import failure_links as links
from failure_patience import Patience

from regrow import LocalCluster
from regrow.processes import ProcessStat, marked

CLIENT = Path(__file__).with_name("failure_client.py")
# A busy machine must not pass for a hung slice.
HANG_AFTER_S = 2.0
RECONNECT_S = 1.0
SHORT_BREAK_S = 0.3
SHORT_STOP_S = 1.0
ANSWER_S = 45.0


class Hang(AssertionError):
    """The client did not answer: the one thing that must never happen."""


class Client:
    """The process that runs `failure_client.py`."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT)],
            env=os.environ | env | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.jax = self._answer(90)["ready"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        line, patience = None, Patience(timeout_s)
        while line is None and not patience.over():
            with contextlib.suppress(queue.Empty):
                line = self._answers.get(timeout=0.1)
        if line is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            raise Hang(f"no answer of the client in {timeout_s:g} s")
        assert line, f"the client has ended with status {self.process.wait(5)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def post(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def do(self, do: str, timeout_s: float = ANSWER_S, **arguments: Any) -> Any:
        """Has it do something; its answer."""
        self.post(do, **arguments)
        answer = self._answer(timeout_s)
        assert "failed" not in answer, f"{do} {arguments}: {answer['failed']}"
        return answer["value"]

    def close(self, timeout_s: float = 10) -> int:
        """Ends it; its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join()
            self.process.stdout.close()


class Rig:
    """A cluster with a client."""

    def __init__(self, home: Path, slices: int = 3, per_slice: int = 2, hosts: int = 1) -> None:
        self.cluster = LocalCluster(
            slices,
            per_slice,
            hosts_per_slice=hosts,
            home=home,
            hang_after_s=HANG_AFTER_S,
            reconnect_s=RECONNECT_S,
            log_dir=os.environ.get("REGROW_TEST_LOGS"),
        )
        self.run_id = self.cluster._supervisor.state.run_id
        self.all = list(range(slices))
        self.client = Client(self.cluster.env)

    def close(self) -> None:
        """Ends everything."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.client.close()
        self.cluster.close()
        assert not marked(self.run_id)

    def ready(self) -> None:
        """Mends what a failed test left."""
        for one in self.cluster.slices:
            if one.state == "lost":
                self.cluster.restore(one.index)
        self.cluster.wait_healthy(40)
        if self.client.process.poll() is not None:
            self.renew_client()

    def renew_client(self) -> None:
        """Replaces a client that hangs or has ended."""
        self.client.process.kill()
        self.client.close()
        self.client = Client(self.cluster.env)

    # --- what is known ---

    def pids(self, index: int) -> tuple[int, ...]:
        return tuple(self.cluster.slices[index].pids)

    def all_pids(self) -> dict[int, tuple[int, ...]]:
        return {one.index: tuple(one.pids) for one in self.cluster.slices}

    def lost(self) -> list[int]:
        return [one.index for one in self.cluster.slices if one.state == "lost"]

    def processes(self) -> int:
        """How many processes the cluster has."""
        return len(marked(self.run_id))

    def accounts(self) -> str:
        """For each process: its state, and how long it has run and has waited for a processor.

        A process that is stopped, or that the machine gave no time, is no hang of ours.
        """
        pids = {self.client.process.pid, self.cluster.head_pid} | marked(self.run_id)
        return "\n".join(filter(None, map(account, sorted(pids))))

    # --- faults ---

    def signal(self, index: int, signum: signal.Signals) -> None:
        for pid in self.pids(index):
            os.kill(pid, signum)

    def cut_collectives(self, index: int) -> int:
        others = [pid for i, pids in self.all_pids().items() if i != index for pid in pids]
        return sum(links.cut_tcp_between(pid, others) for pid in self.pids(index))


def account(pid: int) -> str:
    """One line about a process; empty if it has ended."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        times = [list(map(int, (one / "schedstat").read_text().split())) for one in threads]
    except OSError:
        return ""
    stat = ProcessStat.of(pid)
    ran, waited = (sum(time[part] for time in times) / 1e9 for part in (0, 1))
    state = "?" if stat is None else stat.state
    return f"{name} ({pid}): {state}, ran {ran:.1f} s, waited for a processor {waited:.1f} s"


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    patience = Patience(timeout_s)
    while not condition():
        assert not patience.over(), "waited in vain"
        time.sleep(0.005)


@contextlib.contextmanager
def rig(home: Path, **options: Any) -> Iterator[Rig]:
    one = Rig(home, **options)
    try:
        yield one
    finally:
        one.close()
