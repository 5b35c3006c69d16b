"""Temporary directories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from regrow.scratch import scratch

HOLDS = """
import time
from regrow.scratch import scratch
with scratch("test") as path:
    (path / "file").touch()
    print(path, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def age(path: Path) -> None:
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))


def test_it_is_there_for_the_block(base: Path) -> None:
    with scratch("test") as path:
        assert path.parent == base
        assert "test" in path.name
        (path / "file").touch()
    assert not list(base.iterdir())


def test_one_of_a_killed_process_is_removed_by_the_next_and_no_other(base: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        age(left)
        with scratch("other"):
            assert left.exists()  # Its process lives.
        holder.send_signal(signal.SIGKILL)
    young, file = base / "regrow-scratch-young", base / "regrow-scratch-file"
    young.mkdir()
    file.touch()
    age(file)
    elsewhere = base / "elsewhere"
    elsewhere.mkdir()
    age(elsewhere)
    (base / "regrow-scratch-link").symlink_to(elsewhere)
    with scratch("other"):
        assert not left.exists()
    names = {path.name for path in base.iterdir()}
    assert names == {young.name, file.name, "regrow-scratch-link", "elsewhere"}
