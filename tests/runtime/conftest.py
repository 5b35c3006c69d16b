"""What the tests of the whole runtime share: clusters, and scripts that are their clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import regrow

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = str(Path(regrow.__file__).parents[1])


def cases_of(script: str) -> list[str]:
    """The names of a script's cases."""
    return re.findall(r"^@case\ndef (\w+)", (PROGRAMS / script).read_text(), re.MULTILINE)


def with_sources(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process with `variables`, and with this regrow importable."""
    path = [variables.get("PYTHONPATH", ""), SOURCES, os.environ.get("PYTHONPATH", "")]
    return os.environ | variables | {"PYTHONPATH": ":".join(filter(None, path))}


def run_script(
    script: str, *arguments: str, variables: Mapping[str, str], timeout_s: float = 110
) -> subprocess.CompletedProcess[str]:
    """Runs one of the programs beside this file."""
    return subprocess.run(
        [sys.executable, "-u", str(PROGRAMS / script), *arguments],
        env=with_sources(variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
