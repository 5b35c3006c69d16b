from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

# In processes of their own: the tests' own process has threads, which would get the signals.
IN_ONE_THREAD = """
import os, select, signal, subprocess
from regrow.cli.signals import Received, SignalQueue
with SignalQueue([signal.SIGUSR1, signal.SIGTERM]) as queue:
    assert queue.take() == []
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert select.select([queue], [], [], 5)[0] == [queue]
    received = set(queue.take())
    assert received == {Received(signal.SIGUSR1, False), Received(signal.SIGTERM, False)}
    assert queue.take() == []
    process = subprocess.Popen(["sleep", "60"], preexec_fn=queue.release_in_child)
    process.terminate()
    assert process.wait(5) == -signal.SIGTERM
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_signals_wait_until_they_are_taken():
    subprocess.run([sys.executable, "-c", IN_ONE_THREAD], check=True, timeout=30)


ON_TERMINAL = """
import fcntl, select, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from regrow.cli.signals import SignalQueue
with SignalQueue([signal.SIGINT]) as queue:
    print("ready", flush=True)
    select.select([queue], [], [], 10)
    print(queue.take(), flush=True)
"""


def test_ctrl_c_is_told_from_a_signal_of_a_process():
    pty = pytest.importorskip("pty")
    terminal, its_end = pty.openpty()
    # Not `pty.fork`: this process may have threads, of JAX say.
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
    )
    os.close(its_end)
    output = b""
    deadline = time.monotonic() + 20
    while b"]" not in output and time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        chunk = os.read(terminal, 1024)
        if b"ready" in chunk:
            os.write(terminal, b"\x03")
        output += chunk
    assert process.wait(20) == 0
    os.close(terminal)
    assert b"from_terminal=True" in output
