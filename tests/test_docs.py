"""The walk of docs/multislice.md: every command of it, in order, and what they print."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "@@@"


def steps_of(text: str) -> list[tuple[str, str | None]]:
    """The commands, each block with what it is to print."""
    steps: list[tuple[str, str | None]] = []
    for kind, content in BLOCK.findall(text):
        if kind == "sh":
            steps.append((content, None))
        else:
            steps[-1] = (steps[-1][0], content)
    return steps


def pattern_of(shown: str) -> re.Pattern[str]:
    """A line of dots is any number of lines; dots within a line are anything."""
    parts = []
    for line in shown.splitlines():
        inner = ".*".join(re.escape(part) for part in line.split("..."))
        parts.append(r"(.*\n)*" if line == "..." else f"{inner}\n")
    return re.compile("".join(parts))


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_multislice_walk(tmp_path):
    text = (DOCS / "multislice.md").read_text().replace("8470", free_port())
    steps = steps_of(text)
    assert len(steps) > 12
    script = "set -eu\n" + "".join(f"echo '{MARK}'\n{commands}" for commands, _ in steps)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("REGROW_")}
    environ |= {
        "REGROW_HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    try:
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
    finally:
        regrow = [sys.executable, "-m", "regrow"]
        subprocess.run([*regrow, "cloud", "down"], env=environ, capture_output=True)
    outputs = done.stdout.split(f"{MARK}\n")[1:]
    assert done.returncode == 0, f"{outputs[-1:]}\n{done.stderr[-4000:]}"
    for (commands, shown), output in zip(steps, outputs, strict=True):
        if shown is not None:
            assert pattern_of(shown).fullmatch(output), f"{commands}\nprints\n{output}"
