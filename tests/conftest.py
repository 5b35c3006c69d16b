"""What holds for every test: a home of its own, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Inherited by every process that a test starts, however deep, so that it can be found afterwards.
MARK = "REGROW_TEST_RUN"
MARK_VALUE = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
# Processes end a moment after they were told to; a leak is what is still there after this.
GRACE_S = 5.0
SHARED_MEMORY = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = MARK_VALUE
    # A shell has what it starts in the background ignore Ctrl-C, and so would every process of a test.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _regrow_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the clusters of the tests away from those of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGROW_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_at_the_end() -> Iterator[None]:
    yield
    left = _wait_until_gone(set())
    assert not left, _told("when all tests had ended", left)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Objects that know each other stay, as in a head, which seldom looks for such garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _nothing_left(_nothing_left_at_the_end: None) -> Iterator[None]:
    """Fails a test that leaves a process or a file in shared memory behind.

    What a fixture of a wider scope started stays, and so do the processes that this started since.
    """
    # A child may be so young that its environment, and so its mark, is not there yet.
    children = {child.pid for child in psutil.Process().children()}
    processes, files = _marked_processes() | children, _shared_files()
    yield
    left = _wait_until_gone(processes)
    assert not left, _told("after the test", left)
    left_files = _wait_until_removed(files)
    assert not left_files, f"left in {SHARED_MEMORY} after the test: {sorted(left_files)}"


def _wait_until_gone(allowed: set[int]) -> set[int]:
    deadline = time.monotonic() + GRACE_S
    while True:
        left = {pid for pid in _marked_processes() - allowed if not _descends_from(pid, allowed)}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _wait_until_removed(allowed: set[str]) -> set[str]:
    """What is in shared memory that was not, and that no process uses. Tests beside this one come and go."""
    deadline = time.monotonic() + GRACE_S
    while True:
        left = {name for name in _shared_files() - allowed if not _used_by_others(name)}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _marked_processes() -> set[int]:
    """The living processes that carry the mark, this one left out."""
    wanted = f"{MARK}={MARK_VALUE}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            # A process that is a zombie or of another user has nothing to read here.
            with open(f"/proc/{name}/environ", "rb", buffering=0) as environ:
                if wanted in environ.read().split(b"\0"):
                    found.add(int(name))
        except OSError:
            continue
    return found


def _descends_from(pid: int, ancestors: set[int]) -> bool:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
        if pid in ancestors:
            return True
    return False


def _shared_files() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.iterdir()}


def _used_by_others(name: str) -> bool:
    """Whether a living process that is none of ours has the file open: then it is not our leak."""
    path = str(SHARED_MEMORY / name)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if path in (process / "maps").read_text():
                return True
            if any(str(link.readlink()) == path for link in (process / "fd").iterdir()):
                return True
        except OSError:
            continue
    return not Path(path).exists()


def _told(when: str, pids: set[int]) -> str:
    lines = [f"processes left {when}:"]
    for pid in sorted(pids):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        lines.append(f"  {pid}: {words.decode(errors='replace')[:200]}")
    return "\n".join(lines)
