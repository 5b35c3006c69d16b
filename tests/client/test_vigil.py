"""A client of a head that stands still, with real processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import regrow
from regrow.client.connections import hang_up, known_as, peer_pid
from regrow.client.settings import HEAD_DEADLINE_VARIABLE, Settings, head_deadline_from
from regrow.errors import UsageError
from regrow.processes import is_traced

SOURCES = str(Path(regrow.__file__).parents[1])
DEADLINE_S = 3.0
ENDS_WITHIN_S = 40.0

CLIENT = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np
device = jax.devices()[0]
x = jax.device_put(np.ones((64, 64), np.float32), device)
square = jax.jit(lambda x: x @ x)
square(x).block_until_ready()
def answer(): return square(x).block_until_ready()
def fetch(): return np.asarray(x.copy())
def put(): return jax.device_put(np.zeros((64, 64), np.float32), device).block_until_ready()
def compile(): return jax.jit(lambda x: jnp.sin(x) + 2).lower(x).compile()(x)
def told(wait):
    try:
        wait()
        said = "value"
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    sys.stdout.write(f"{wait.__name__} {said}\\n")
threads = [threading.Thread(target=told, args=(w,)) for w in (answer, fetch, put, compile)]
print("ready", flush=True)
input()
for thread in threads: thread.start()
for thread in threads: thread.join()
told(answer)
"""


@pytest.fixture
def cluster() -> Iterator[regrow.LocalCluster]:
    with regrow.LocalCluster(slices=1, devices_per_slice=1, port=0) as made:
        yield made


@contextlib.contextmanager
def client(variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A client that has asked for nothing yet, but is about to once it is given a line."""
    variables = {HEAD_DEADLINE_VARIABLE: str(DEADLINE_S), "PYTHONPATH": SOURCES} | variables
    with subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(CLIENT)],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def over_tcp(cluster: regrow.LocalCluster) -> dict[str, str]:
    assert cluster.tcp_target is not None
    return cluster.env | {
        "REGROW_TARGET": cluster.tcp_target,
        "REGROW_TOKEN": str(cluster.token),
        "JAX_BACKEND_TARGET": cluster.tcp_target,
    }


def test_every_wait_for_a_stopped_head_ends(cluster: regrow.LocalCluster) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(client(env)) for env in (dict(cluster.env), over_tcp(cluster))
        ]
        os.kill(cluster.head_pid, signal.SIGSTOP)
        for process in clients:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in clients:
            out, errors = process.communicate(timeout=ENDS_WITHIN_S)
            assert process.returncode == 0, errors
            told = dict(line.split(" ", 1) for line in out.splitlines())
            assert set(told) == {"answer", "fetch", "put", "compile"}, out
            assert all(text.startswith("UNAVAILABLE: ") for text in told.values()), out
            [line] = re.findall("^regrow: .*", errors, re.MULTILINE)
            assert "is gone (it has not answered for 3 s; REGROW_HEAD_DEADLINE sets" in line


@pytest.mark.slow
def test_a_head_in_a_debugger_is_waited_for(cluster: regrow.LocalCluster) -> None:
    with client(dict(cluster.env)) as process, attached(cluster.head_pid):
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(2 * DEADLINE_S)
        detach(cluster.head_pid)
        out, errors = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 0, errors
    assert len(re.findall("^[a-z]+ value$", out, re.MULTILINE)) == 5, out
    assert errors == ""


_PTRACE_ATTACH, _PTRACE_DETACH = 16, 17
_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@contextlib.contextmanager
def attached(pid: int) -> Iterator[None]:
    """As a debugger does, which stops the process."""
    if _ptrace(_PTRACE_ATTACH, pid, None, None) < 0:
        pytest.skip("processes may not be traced here")
    os.waitpid(pid, 0x40000000)  # __WALL
    assert is_traced(pid)
    try:
        yield
    finally:
        detach(pid)


def detach(pid: int) -> None:
    _ptrace(_PTRACE_DETACH, pid, None, None)


@pytest.mark.parametrize("family", ["unix", "tcp", "mapped"])
def test_connections_are_found_by_their_address(tmp_path: Path, family: str) -> None:
    path = str(tmp_path / "head.sock")
    listener = socket.socket(socket.AF_UNIX if family == "unix" else socket.AF_INET)
    listener.bind(path if family == "unix" else ("127.0.0.1", 0))
    address = listener.getsockname()
    mine = socket.socket(socket.AF_INET6 if family == "mapped" else listener.family)
    ours, theirs = socket.socketpair()
    with listener, mine, ours, theirs:
        listener.listen()
        mine.connect(("::ffff:127.0.0.1", address[1]) if family == "mapped" else address)
        mine.settimeout(5)
        assert peer_pid(mine) == (os.getpid() if family == "unix" else None)
        ender = threading.Timer(0.1, hang_up, [known_as(address)])
        ender.start()
        assert mine.recv(1) == b""
        ender.join()
        ours.send(b"x")
        assert theirs.recv(1) == b"x"


def test_a_deadline_is_a_time() -> None:
    assert head_deadline_from({}) == 60
    assert head_deadline_from({HEAD_DEADLINE_VARIABLE: "0.5"}) == 0.5
    assert head_deadline_from({HEAD_DEADLINE_VARIABLE: "never"}) is None
    for wrong in ("0", "-1", "soon", "nan", "inf"):
        with pytest.raises(UsageError, match="no number of seconds above 0, nor 'never'"):
            head_deadline_from({HEAD_DEADLINE_VARIABLE: wrong})


def test_settings_take_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEAD_DEADLINE_VARIABLE, "7")
    assert Settings.of("localhost:1").head_deadline_s == 7
