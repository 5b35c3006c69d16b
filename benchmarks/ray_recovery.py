"""A host of a TPU on a Ray cluster is lost: until training goes on, by phase.

    python benchmarks/run.py ray [--rounds N]

A Ray head, a local Cloud TPU and a v4-16 whose two hosts run raylets and JAX with four CPU devices each.
Either the raylet of a host is killed, or the TPU is deleted, by somebody else.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import harness

from regrow.cloud import local
from regrow.cloud.bodies import NodeRequest
from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.cloud.nodes import delete_node
from regrow.cloud.server.state_dir import StateDir
from regrow.errors import RegrowError
from regrow.processes import python_argv
from regrow.ray import RankJob, RayCluster, RayTpuController, RestartPolicy, TpuSpec
from regrow.ray.head import start_head

PLACE = Place("p", "us-central2-b")
V4_16 = NodeRequest(runtime_version="tpu-ubuntu2204-base", type="V4", topology="2x2x2")
NAME = "bench"
STEPS_BEFORE = 40
WAIT_S = 300.0
# What the controller says, in the order of time, and the phase that ends there.
SAID = {
    "Attempt": "the loss is found",
    "Ray already started": "the hosts are nodes of the cluster again",
    "Queued": "ranks are submitted",
}
HAPPENED = {
    "begins": "all ranks run",
    "Starting": "JAX is imported, ranks have met, the checkpoint is read",
    "step": "the first step is done (its program is in the compile cache)",
}


class Bench:
    """One job on one TPU that is disturbed again and again."""

    def __init__(self, stack: ExitStack) -> None:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="regrow-ray-")))
        self.events = scratch / "events"
        self.said: list[tuple[float, str]] = []
        head = start_head(port=0, dashboard_port=0)
        stack.callback(head.end)
        state_dir = StateDir(scratch / "cloud")
        flags = ["--detach", "--port", "0", "--state-dir", str(state_dir.path)]
        subprocess.run(python_argv("regrow", "cloud", "up", *flags), check=True, timeout=WAIT_S)
        stack.callback(local.end, state_dir, WAIT_S)
        self.client = CloudClient(state_dir.server().endpoint, token=state_dir.token())
        stack.callback(self.client.close)
        self.controller = RayTpuController(
            self.client,
            PLACE,
            TpuSpec(name=NAME, node=V4_16),
            RayCluster(head.address),
            log_dir=scratch / "logs",
            say=lambda text: self.said.append((time.time(), text)),
        )
        program = str(harness.PROGRAMS / "ray_training.py")
        flags = ["--steps=1000000", "--checkpoint-every=20"]
        self.job = RankJob(
            name=NAME,
            command=["python3", program, str(self.events), *flags],
            directory=str(scratch / "checkpoints"),
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        # At the end everything is taken from under it; before, whoever waits sees that it is over.
        with suppress(RegrowError):
            self.controller.run(self.job, restarts=RestartPolicy(preemptions=1_000))

    def happened(self) -> list[dict[str, object]]:
        text = self.events.read_text() if self.events.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def stepped(self, attempt: int) -> bool:
        """Whether that attempt has trained for a while, past a checkpoint."""
        told = [one["what"] for one in self.happened() if one["attempt"] == attempt]
        return sum(str(what).startswith("checkpoint") for what in told) >= STEPS_BEFORE // 20

    def round(self, attempt: int, disturb: Callable[[], None]) -> dict[str, float]:
        """Disturbs an attempt; seconds from that until the end of each phase."""
        self._until(lambda: self.stepped(attempt), "training")
        self.said.clear()
        begin = time.time()
        disturb()
        self._until(lambda: self._first_step(attempt + 1) is not None, "training again")
        ends = {}
        for word, phase in SAID.items():
            ends[phase] = next(at for at, text in self.said if text.startswith(word)) - begin
        events = [one for one in self.happened() if one["attempt"] == attempt + 1]
        begun = [float(one["at"]) for one in events if one["what"] == "begins"]  # type: ignore[arg-type]
        ends[HAPPENED["begins"]] = max(begun[:2]) - begin
        starting = next(one for one in events if str(one["what"]).startswith("Starting"))
        ends[HAPPENED["Starting"]] = float(starting["at"]) - begin  # type: ignore[arg-type]
        ends[HAPPENED["step"]] = float(self._first_step(attempt + 1)) - begin  # type: ignore[arg-type]
        return ends

    def _first_step(self, attempt: int) -> object:
        for one in self.happened():
            if one["attempt"] == attempt and " step " in str(one["what"]):
                return one["at"]
        return None

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise RuntimeError(f"waited in vain for {what}: {self.said[-5:]}")
            time.sleep(0.05)

    def kill_raylet(self) -> None:
        os.kill(raylet_at(self.controller.joined()[1].address), signal.SIGKILL)

    def delete_tpu(self) -> None:
        delete_node(self.client, PLACE, NAME, timeout_s=WAIT_S)


def raylet_at(address: str) -> int:
    """The raylet of the node with an address."""
    wanted = f"--node_ip_address={address}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"/raylet") and wanted in words:
            return int(entry.name)
    raise RuntimeError(f"no raylet at {address}")


def recovery(rounds: int) -> str:
    """The table."""
    kinds = {"raylet killed": Bench.kill_raylet, "TPU deleted": Bench.delete_tpu}
    columns: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        bench = Bench(stack)
        attempt = 0
        for kind, disturb in kinds.items():
            columns[kind] = []
            for _ in range(rounds):
                attempt += 1
                columns[kind].append(bench.round(attempt, lambda disturb=disturb: disturb(bench)))
    rows = [
        [phase, *(_shown([one[phase] for one in column]) for column in columns.values())]
        for phase in [*SAID.values(), *HAPPENED.values()]
    ]
    return harness.table(["until", *kinds], rows)


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
