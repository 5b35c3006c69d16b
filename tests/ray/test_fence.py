"""The token of a directory: an attempt that is over cannot write, nor hold up the next for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from regrow.errors import FencedError, UsageError, WaitTimeout
from regrow.ray.fence import ATTEMPT_VARIABLE, AttemptId, Guard, current_attempt

WRITER = """
import sys, time
from pathlib import Path
from regrow.ray import current_attempt
attempt = current_attempt()
with attempt.writing():
    print("writes", flush=True)
    time.sleep(float(sys.argv[1]))
    Path(attempt.directory, "written").write_text(attempt.token)
with attempt.writing():
    Path(attempt.directory, "again").write_text(attempt.token)
"""


def attempt_id(directory: Path, token: str = "old") -> AttemptId:
    return AttemptId(job="j", token=token, number=1, rank=0, ranks=1, directory=str(directory))


def writer(directory: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(seconds)],
        env=os.environ | {ATTEMPT_VARIABLE: attempt_id(directory).to_json()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writes\n"
    return process


def test_the_next_attempt_waits_for_a_write_and_then_shuts_the_old_one_out(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    guard.claim("old", timeout_s=5)
    process = writer(tmp_path, 0.5)
    guard.claim("new", timeout_s=30)
    assert (tmp_path / "written").read_text() == "old"
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "FencedError" in errors
    assert not (tmp_path / "again").exists()
    with pytest.raises(FencedError, match="belongs to a later attempt"):
        attempt_id(tmp_path).check()
    attempt_id(tmp_path, "new").check()


def test_a_writer_that_hangs_is_named_and_one_that_was_killed_holds_nobody_up(
    tmp_path: Path,
) -> None:
    guard = Guard(tmp_path)
    guard.claim("old", timeout_s=5)
    process = writer(tmp_path, 1000)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(WaitTimeout, match="an earlier attempt to stop writing"):
        guard.claim("new", timeout_s=0.2)
    assert guard.holder() == "new", "whoever wakes up is shut out all the same"
    process.kill()
    process.communicate(timeout=30)
    guard.claim("new", timeout_s=5)
    assert guard.holder() == "new"


def test_two_ranks_of_an_attempt_write_at_once(tmp_path: Path) -> None:
    Guard(tmp_path).claim("t", timeout_s=5)
    inside = threading.Barrier(2, timeout=20)

    def write() -> None:
        with Guard(tmp_path).writing("t"):
            inside.wait()

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not inside.broken


def test_without_a_directory_nothing_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = AttemptId(job="j", token="t", number=3, rank=1, ranks=2)
    monkeypatch.setenv(ATTEMPT_VARIABLE, attempt.to_json())
    assert current_attempt() == attempt
    attempt.check()
    with attempt.writing():
        pass


def test_a_process_that_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT_VARIABLE, raising=False)
    with pytest.raises(UsageError, match="no rank"):
        current_attempt()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    began = time.monotonic()
    with pytest.raises(UsageError, match="cannot use"):
        Guard(tmp_path / "file" / "below").claim("t", timeout_s=60)
    assert time.monotonic() - began < 50
