"""A local Cloud TPU, and programs on its hosts, by the commands that a user gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from regrow.processes import ProcessId

PROGRAMS = Path(__file__).parent / "programs"


class LocalSlices:
    """Its queued resources are spot, so that they can be preempted."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def regrow(self, *arguments: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        environ = {
            name: value
            for name, value in os.environ.items()
            # The mark by which the tests find what is left behind is kept.
            if not name.startswith("REGROW_") or name == "REGROW_TEST_RUN"
        }
        return subprocess.run(
            [sys.executable, "-m", "regrow", *arguments],
            env=environ
            | {name: os.environ[name] for name in os.environ if "TEST" in name}
            | {"REGROW_HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def good(self, *arguments: str) -> str:
        done = self.regrow(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self) -> None:
        self.good("cloud", "up", "--detach", "--port", "0", "--notice", "0.1", "--stop", "1")
        self.good("config", "set", "project", "p")
        self.good("config", "set", "zone", "us-central2-b")

    def stop(self) -> None:
        self.good("cloud", "down")

    def create(self, name: str, count: int, shape: str, *arguments: str) -> None:
        flags = ["--accelerator-type", shape, "--runtime-version", "tpu-ubuntu2204-base", "--spot"]
        count_flags = ["--node-count", str(count), "--wait"]
        self.good("queued-resources", "create", name, *count_flags, *flags, *arguments)

    def delete(self, name: str) -> None:
        self.good("queued-resources", "delete", name, "--force", "--quiet")

    def run(
        self, name: str, program: str, *arguments: str, python: str = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of the programs on every host."""
        command = " ".join([python, str(PROGRAMS / program), *arguments])
        everywhere = ["--node", "all", "--worker", "all", "--command", command]
        return self.regrow("queued-resources", "ssh", name, *everywhere)

    def kill_host(self, node: str) -> None:
        """A host of a slice dies without a word."""
        for path in self.home.glob("cloud/hosts/*/*/0/agent.json"):
            environ = json.loads(path.with_name("host.json").read_text())["environ"]
            process = ProcessId(**json.loads(path.read_text())["process"])
            if environ["TPU_NAME"] == node and process.alive():
                os.kill(process.pid, signal.SIGKILL)
