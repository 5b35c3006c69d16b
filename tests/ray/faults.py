"""A Ray cluster whose head may die, a TPU that has joined it, and jobs that commands run there."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from cloud_server import LocalCloud
from rays import LONG, described, raylet_at, raylets_at, until

from regrow.cloud.bodies import NodeRequest
from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.processes import ProcessStat, marked, name_of
from regrow.ray import RayCluster, RayTpuController, TpuSpec
from regrow.ray.fence import ATTEMPT_VARIABLE
from regrow.ray.head import HeadEntry, RayHead

PLACE = Place("p", "us-central2-b")
V4_16 = NodeRequest(runtime_version="tpu-ubuntu2204-base", type="V4", topology="2x2x2")
PROGRAM = Path(__file__).with_name("programs") / "training.py"
TPU = "t"
# Neither where the kernel takes ports for others while the head is down, nor where Ray does.
PORTS = range(6_400, 9_900)
RANKS = (0, 1)


class World:
    """The cluster, the cloud and the TPU."""

    def __init__(self, home: Path, cloud: LocalCloud) -> None:
        self.home, self.cloud = home, cloud
        self.client = CloudClient(cloud.directory.server().endpoint, token=cloud.directory.token())
        self.port = _free_port()
        self.head_up()
        self.controller = RayTpuController(
            self.client, PLACE, TpuSpec(name=TPU, node=V4_16), RayCluster(self.head.address)
        )

    # --- the head ---

    @property
    def head(self) -> RayHead:
        return HeadEntry(self.home).find()

    def head_up(self) -> None:
        """As users start it; again, if it has died."""
        options = ["--port", str(self.port), "--dashboard-port", "0"]
        done = self.regrow("ray", "head", "up", *options)
        assert done.returncode == 0, done.stderr

    def head_down(self) -> None:
        with suppress(Exception):
            HeadEntry(self.home).down()

    def head_pids(self) -> list[int]:
        names = ("gcs_server", "raylet")
        return [pid for pid in marked(self.head.run_id) if name_of(pid) in names]

    # --- the hosts ---

    def raylet(self, rank: int) -> int:
        return raylet_at(self.controller.tpu.addresses()[rank])

    def raylets(self) -> list[int]:
        """The living raylets of the hosts, those that nobody needs included."""
        return [pid for one in self.controller.tpu.addresses() for pid in raylets_at(one)]

    def ready(self) -> None:
        """All hosts have joined, whatever was before."""
        self.controller.cluster.connect()
        self.controller.ensure_ready(timeout_s=LONG)

    # --- commands ---

    def environ(self) -> dict[str, str]:
        # What is started here lives longer than the test, and is ended with the world.
        return os.environ | {"REGROW_HOME": str(self.home), "REGROW_TEST_RUN": ""}

    def regrow(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "regrow", *words],
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )

    def end(self) -> None:
        with suppress(Exception):
            self.controller.delete()
        self.client.close()
        self.head_down()


def _free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


class Job:
    """`regrow ray job` with the training program, and what there is to see of it."""

    def __init__(self, world: World, name: str, scratch: Path, hold: str) -> None:
        self.world, self.name, self.scratch, self.hold = world, name, scratch, hold
        self.directory = scratch / "checkpoints"
        self.process: subprocess.Popen[bytes] | None = None

    # --- the command ---

    def start(self, *options: str) -> None:
        world = self.world
        where = ["--project", "p", "--zone", "us-central2-b", "--endpoint", world.client.endpoint]
        words = [
            *("ray", "job", "--tpu", TPU, "--type", "V4", "--topology", "2x2x2"),
            *("--address", world.controller.cluster.address, "--name", self.name),
            *("--checkpoint-dir", str(self.directory), "--log-dir", str(self.scratch / "logs")),
            *("--deadline", f"{2 * LONG:g}s", *options, *where, "--"),
            *("python3", "-u", str(PROGRAM), str(self.scratch), self.hold),
        ]
        with (self.scratch / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "regrow", *words],
                env=os.environ | {"REGROW_HOME": str(world.home)},
                stdout=output,
                stderr=output,
            )

    def said(self) -> str:
        return (self.scratch / "output").read_text()

    def until_said(self, text: str) -> None:
        self.until(lambda: text in self.said())

    def until(self, condition: object) -> None:
        """Waits for something that the job does."""
        assert callable(condition)
        until(lambda: condition() or self._ended())
        assert condition(), self.said()

    def _ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def send(self, signum: int) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(3 * LONG)

    def go_on(self) -> None:
        (self.scratch / "go").touch()

    # --- its ranks ---

    def holds(self, rank: int) -> bool:
        return (self.scratch / f"holds-{rank}").exists()

    def until_held(self) -> None:
        """Waits until all ranks hold."""
        self.until(lambda: all(self.holds(rank) for rank in RANKS))

    def program(self, rank: int) -> int:
        return int((self.scratch / f"pid-{rank}").read_text())

    def processes(self) -> set[int]:
        """All that belongs to a rank of any attempt.

        A worker of Ray's that was started for a supervisor, which was ended before it came there, is
        kept by Ray for the next one.
        """
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "cmdline").read_bytes().startswith(b"ray::IDLE"):
                    continue
                text = (entry / "environ").read_bytes()
                if f'{ATTEMPT_VARIABLE}={{"job": "{self.name}"'.encode() in text:
                    found.add(int(entry.name))
        return found

    # --- what has come of it ---

    def check(self) -> None:
        """It has computed what it computes without a fault, and nobody wrote out of turn."""
        for rank in RANKS:
            final = json.loads((self.directory / f"final-{rank}").read_text())
            assert final == undisturbed(rank)
        self.check_fence()

    def check_fence(self) -> None:
        writes = self.directory / "writes"
        lines = writes.read_text().splitlines() if writes.exists() else []
        turns = [token for token, _ in groupby(line.split()[0] for line in lines)]
        assert len(turns) == len(set(turns)), f"an old attempt wrote after a new one: {lines}"

    def check_no_process_left(self) -> None:
        with suppress(AssertionError):
            until(lambda: not self.processes())
        left = described(self.processes())
        assert not left, left

    def check_nothing_left(self) -> None:
        self.check_no_process_left()
        left = self.world.raylets()
        states = [(pid, stat.state) for pid in left if (stat := ProcessStat.of(pid))]
        assert len(states) <= len(RANKS), f"raylets of hosts that are none: {states}"
        assert not [state for _, state in states if state == "T"], states
        unfinished = [path.name for path in self.directory.glob("*.draft")]
        assert not unfinished, unfinished


def undisturbed(rank: int) -> object:
    """What a rank computes when nothing happens."""
    sys.path.insert(0, str(PROGRAM.parent))
    try:
        from training import trained
    finally:
        sys.path.remove(str(PROGRAM.parent))
    return trained(rank)


def signal_all(pids: Sequence[int], signum: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
