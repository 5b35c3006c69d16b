"""Pages of docs/ that are walked: every command of them, in order, and what they print."""

from __future__ import annotations

import importlib.util
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


def walk(text: str, cwd: Path, environ: dict[str, str], *, merged: bool) -> None:
    """Runs all commands of a page, and compares what they print.

    Args:
        text: The page.
        cwd: Where they are run.
        environ: The environment.
        merged: Whether standard error is compared, too.
    """
    steps = steps_of(text)
    script = "set -eu\n" + "".join(f"echo '{MARK}'\n{commands}" for commands, _ in steps)
    with (cwd / "walk.log").open("w+") as log, (cwd / "errors.log").open("w+") as other:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=cwd,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT if merged else other,
            check=False,
        )
        log.seek(0)
        other.seek(0)
        outputs = log.read().split(f"{MARK}\n")[1:]
        assert done.returncode == 0, f"{outputs[-1:]}\n{other.read()[-4000:]}"
    for (commands, shown), output in zip(steps, outputs, strict=True):
        if shown is not None:
            assert pattern_of(shown).fullmatch(output), f"{commands}\nprints\n{output}"


def walk_environ(home: Path) -> dict[str, str]:
    """A user's environment with a home of its own."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("REGROW_H")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return environ | {"REGROW_HOME": str(home), "PATH": path, "USER": "me", "LOGNAME": "me"}


def end(environ: dict[str, str], *commands: str) -> None:
    """Ends what a walk may have left."""
    for command in commands:
        argv = [sys.executable, "-m", "regrow", *command.split()]
        subprocess.run(argv, env=environ, capture_output=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_multislice_walk(tmp_path):
    text = (DOCS / "multislice.md").read_text().replace("8470", free_port())
    assert len(steps_of(text)) > 12
    environ = walk_environ(tmp_path / "home")
    try:
        walk(text, tmp_path, environ, merged=False)
    finally:
        end(environ, "cloud down")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("ray", "flax", "sklearn", "matplotlib")),
    reason="the extras ray, search and plots are not installed",
)
def test_the_ray_walk(tmp_path):
    text = (DOCS / "ray.md").read_text()
    # Somebody else may have the usual ports.
    for command, ports in (
        ("regrow cloud up --detach", "--port 0"),
        ("regrow ray head up", "--port 0 --dashboard-port 0"),
    ):
        assert command in text
        text = text.replace(command, f"{command} {ports}")
    assert len(steps_of(text)) > 10
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    environ = walk_environ(tmp_path / "home")
    try:
        walk(text, tmp_path, environ, merged=True)
    finally:
        end(environ, "down", "cloud down", "ray head down")
