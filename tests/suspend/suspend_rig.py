"""A cluster with a client whose state is suspended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regrow import LocalCluster
from regrow.control import request
from regrow.errors import RegrowError

CLIENT = Path(__file__).with_name("suspend_client.py")
ANSWER_S = 60.0
STEPS = 5


class Client:
    """The process that runs `suspend_client.py`."""

    def __init__(self, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT)],
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.asking = False
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert "ready" in self.answer(90)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        line = self._answers.get(timeout=timeout_s)
        assert line, f"the client has ended with status {self.process.wait(5)}"
        self.asking = False
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def silent(self) -> bool:
        return self._answers.empty()

    def post(self, do: str, **arguments: Any) -> None:
        self.asking = True
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def do(self, do: str, **arguments: Any) -> Any:
        self.post(do, **arguments)
        answer = self.answer()
        assert "failed" not in answer, f"{do} {arguments}: {answer['failed']}"
        return answer["value"]

    def failure(self, do: str, **arguments: Any) -> str:
        self.post(do, **arguments)
        return str(self.answer().get("failed"))

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()


class Rig:
    """A cluster and its client; the state before is that of so many steps."""

    def __init__(self, home: Path, slices: int = 2, hosts: int = 1, **options: Any) -> None:
        self.home = home
        self.cluster = LocalCluster(slices, 2, hosts_per_slice=hosts, home=home, **options)
        self.client = Client(self.cluster.env)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.cluster.close()

    def states(self) -> list[str]:
        return [one.state for one in self.cluster.slices]

    def suspended(self) -> list[int]:
        found: list[int] = self.cluster.status()["suspended"]["slices"]
        return found

    def trap(self, index: int, text: str) -> None:
        """Sets a trap: in the head (index below 0), the hosts of a slice, or the next ones of it."""
        there = self.states()[max(index, 0)] != "suspended"
        fault = (
            f"headtrap:{text}" if index < 0 else f"trap:{text}" if there else f"next:trap:{text}"
        )
        path = self.cluster.config.control_socket
        request(path, "fault", index=max(index, 0), fault=fault)

    def place(self) -> str:
        """Where its state goes."""
        config = self.cluster.config
        return f"{config.home}/suspended/{config.name}-{config.run_id[:8]}"


def outcome(act: Callable[[], Any]) -> str | None:
    """What an act fails with, if it does."""
    try:
        act()
    except RegrowError as error:
        return str(error)
    return None
