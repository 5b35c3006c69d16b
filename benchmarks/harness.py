"""What the benchmarks share: programs run in turn under several settings, medians, ratios, a table."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 600.0


def clean_environ(**changes: str) -> dict[str, str]:
    """This process's environment without what would make its children clients of a cluster."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "IFRT_PROXY_", "REGROW_")) and name != "XLA_FLAGS"
    }
    return kept | {"TF_CPP_MIN_LOG_LEVEL": "3"} | changes


def native_environ(devices: int) -> dict[str, str]:
    """Plain JAX in one process."""
    return clean_environ(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(devices))


def cluster_environ(env: Mapping[str, str]) -> dict[str, str]:
    """A client of a cluster."""
    return clean_environ(**env)


def run_program(name: str, env: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    """Runs a program; what it prints last is a JSON object of its figures."""
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / name), *arguments],
        env=dict(env),
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def medians(rounds: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    rounds = list(rounds)
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    """The machine, in one line."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, Python "
        f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}, load {load:.1f} at the start"
    )
