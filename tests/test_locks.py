"""Locks on files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from regrow.locks import lock

_HOLDER = """
import sys, time
from regrow.locks import lock
file = open(sys.argv[1], "ab")
print(lock(file), flush=True)
time.sleep(float(sys.argv[2]))
"""


def _holder(path: Path, seconds: float) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", _HOLDER, str(path), str(seconds)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with _holder(path, 600.0) as process, path.open("ab") as file:
        assert not lock(file)
        assert not lock(file.fileno(), timeout_s=0.05)
        process.kill()
        process.wait()
        assert lock(file)
        with path.open("ab") as another:
            assert not lock(another)


def test_a_lock_that_becomes_free_is_taken(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    with _holder(tmp_path / "lock", 0.5):
        assert lock(descriptor, timeout_s=60.0)
    os.close(descriptor)
