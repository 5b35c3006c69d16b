"""Pages of docs/ that are run: the commands in their blocks `sh`, and the output in the `text` after each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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


def walk(text: str, cwd: Path, environ: Mapping[str, str], timeout_s: float) -> None:
    """Runs all commands of a page, one after the other, and compares what they print."""
    steps = steps_of(text)
    script = "set -eu\n" + "".join(f"echo '{MARK}'\n{commands}" for commands, _ in steps)
    log = cwd / "walk.log"
    with log.open("w") as output:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=cwd,
            env=dict(environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    outputs = log.read_text().split(f"{MARK}\n")[1:]
    assert done.returncode == 0, outputs[-1][-4000:]
    for (commands, shown), printed in zip(steps, outputs, strict=True):
        if shown is not None:
            assert pattern_of(shown).fullmatch(printed), f"{commands}\nprints\n{printed}"


def walk_environ(home: Path) -> dict[str, str]:
    """A user's environment with a home of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("REGROW_H")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return kept | {"REGROW_HOME": str(home), "PATH": path, "USER": "me", "LOGNAME": "me"}
