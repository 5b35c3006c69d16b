"""Host callbacks from the worker over the head into the user's process, without JAX between them."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.channel import rgcb
from regrow.client.callhost import CallbackHost, knock
from regrow.client.connections import dial
from regrow.errors import Code, StatusError
from regrow.worker.callbacks import HostCallbackError, HostCallbacks, user_error
from waiting import until

Rig = Any  # conftest.Rig; test modules are not importable by name


def failure(callbacks: HostCallbacks, *arguments: Any) -> StatusError:
    with pytest.raises(HostCallbackError) as caught:
        callbacks.functions[0](*arguments)
    # XLA puts what a function raised, with a traceback, into an error of its own.
    text = f"INTERNAL: CpuCallback error calling callback: Traceback …\n{caught.value}\n"
    error = user_error(text)
    assert error is not None
    return error


def test_values_go_there_and_back(rig: Rig) -> None:
    host = rig.host()
    callbacks = rig.callbacks(host, np.sin, lambda x, y: x @ y)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(callbacks.functions[0](x)[0], np.sin(x))
    np.testing.assert_array_equal(callbacks.functions[1](x, x.T)[0], x @ x.T)
    big = np.ones(3_000_000, np.float32)
    np.testing.assert_array_equal(callbacks.functions[0](big)[0], np.sin(big))
    host.close()


def test_calls_within_calls_and_many_at_once_never_starve(rig: Rig) -> None:
    host = rig.host()
    inner = rig.callbacks(host, lambda x: x + 1)

    def nested(x: Any) -> Any:
        return inner.functions[0](inner.functions[0](x)[0])[0]

    outer = rig.callbacks(host, nested)
    assert outer.functions[0](np.int64(1))[0] == 3
    meeting = threading.Barrier(8, timeout=10)

    def meet(x: Any) -> Any:
        meeting.wait()
        return x

    together = rig.callbacks(host, meet)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: together.functions[0](np.int64(i))[0], range(8)))
    assert results == list(range(8))
    host.close()


def test_an_error_is_the_users_own(rig: Rig) -> None:
    host = rig.host()

    def bad(x: Any) -> Any:
        raise ValueError("my message 42; NOT_FOUND, INTERNAL and DATA_LOSS are only words here")

    error = failure(rig.callbacks(host, bad), np.int32(1))
    assert error.code is Code.UNKNOWN
    assert error.message.startswith("ValueError: my message 42")
    assert "raise ValueError" in error.message
    assert "client/callhost.py" not in error.message
    for word in ("INTERNAL", "DATA_LOSS", "NOT_FOUND", "DEADLINE_EXCEEDED"):
        assert word not in str(error)
    host.close()


@pytest.mark.parametrize("text", ["", "x" * 100_000])
def test_errors_without_a_text_and_with_a_long_one(rig: Rig, text: str) -> None:
    host = rig.host()

    def bad(x: Any) -> Any:
        raise SystemExit(text)

    error = failure(rig.callbacks(host, bad), np.int32(1))
    assert error.message.startswith("SystemExit")
    assert len(error.message) < 16000
    host.close()


def test_an_exception_that_cannot_tell_its_text(rig: Rig) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def bad(x: Any) -> Any:
        raise Broken

    host = rig.host()
    assert failure(rig.callbacks(host, bad), np.int32(1)).message.startswith("Broken")
    host.close()


def test_a_lost_slice_that_a_callback_met_stays_a_lost_slice(rig: Rig) -> None:
    def bad(x: Any) -> Any:
        raise RuntimeError("DATA_LOSS: slice 1 (incarnation 2): SIGKILL")

    host = rig.host()
    error = failure(rig.callbacks(host, bad), np.int32(1))
    assert error.code is Code.DATA_LOSS
    assert str(error).startswith("DATA_LOSS: slice 1 (incarnation 2): SIGKILL")
    host.close()


def test_results_that_cannot_travel(rig: Rig) -> None:
    host = rig.host()
    error = failure(rig.callbacks(host, lambda x: np.zeros(2, "M8[s]")), np.int32(1))
    assert "datetime64" in error.message
    host.close()


def test_functions_are_let_go_when_xla_has_let_them_go(rig: Rig) -> None:
    host = rig.host()
    callbacks = rig.callbacks(host, np.sin, np.cos)
    held_by_xla = callbacks.functions
    callbacks.close()
    callbacks.close()
    time.sleep(0.1)
    assert held_by_xla[1](np.float32(0))[0] == 1
    assert host.registered() == 1
    token = next(iter(host._programs))
    del held_by_xla
    until(lambda: host.registered() == 0, "the functions to be let go")
    late = HostCallbacks(rig.relay, rgcb.ProgramCallbacks(host.nonce, token, 1))
    assert "does not exist" in failure(late, np.float32(0)).message
    host.close()


def test_functions_stay_while_anybody_may_call_them(rig: Rig) -> None:
    host = rig.host()
    token = host.register([np.sin])
    host.start()
    for holder in ("executable", "host 0", "host 1", "host 1"):
        rig.do(rig.head.hold, host.nonce, token, holder)
    rig.do(rig.head.release, host.nonce, token, "executable")
    rig.do(rig.head.release, host.nonce, token, "host 0")
    rig.do(rig.head.release, host.nonce, token, "nobody")
    rig.do(rig.head.release, host.nonce, token, "host 1")
    time.sleep(0.1)
    assert host.registered() == 1
    rig.do(rig.head.release_all, "host 1")
    until(lambda: host.registered() == 0, "the functions to be let go")
    host.close()


def test_a_nonce_is_for_one_session(rig: Rig) -> None:
    host = rig.host()
    caught: list[StatusError] = []

    def again() -> None:
        try:
            rig.head.open(host.nonce)
        except StatusError as error:
            caught.append(error)

    rig.do(again)
    assert caught[0].code is Code.ALREADY_EXISTS


def test_a_client_that_goes_fails_its_calls_at_once(rig: Rig) -> None:
    host = rig.host()
    entered, leave = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        entered.set()
        leave.wait(20)
        return x

    callbacks = rig.callbacks(host, slow)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(failure, callbacks, np.int32(1))
        assert entered.wait(10)
        begin = time.monotonic()
        rig.do(rig.head.close, host.nonce)
        assert "client" in future.result(5).message
        assert "gone" in failure(callbacks, np.int32(1)).message
        assert time.monotonic() - begin < 2
        leave.set()


def test_a_killed_connection_fails_its_call(rig: Rig) -> None:
    host = rig.host()
    callbacks = rig.callbacks(host, lambda x: (host.close(), x)[1])
    error = failure(callbacks, np.int32(1))
    assert error.code is Code.CANCELLED


def test_deadlines_say_what_was_waited_for(hasty_rig: Rig) -> None:
    host = hasty_rig.host()
    leave = threading.Event()
    callbacks = hasty_rig.callbacks(host, lambda x: (leave.wait(20), x)[1])
    assert "0.3 s for the function of a host callback" in failure(callbacks, np.int32(1)).message
    leave.set()
    silent = CallbackHost(host._settings)
    hasty_rig.do(hasty_rig.head.open, silent.nonce)
    orphan = HostCallbacks(hasty_rig.relay, rgcb.ProgramCallbacks(silent.nonce, 1, 1))
    assert "0.3 s for the client to open" in failure(orphan, np.int32(1)).message
    assert callbacks.functions[0](np.int32(5))[0] == 5
    host.close()


def test_a_stranger_gets_nothing(rig: Rig) -> None:
    host = rig.host()
    callbacks = rig.callbacks(host, np.sin)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(rig.path))
        stranger.settimeout(10)
        stranger.sendall(rgcb.preface("f" * 16))
        assert stranger.recv(1) == b""
    assert callbacks.functions[0](np.float32(0))[0] == 0
    host.close()


@pytest.mark.parametrize(("token", "reason"), [("sesame", ""), ("", "no token"), ("x", "no x")])
def test_a_client_that_knocks(knocking: Path, token: str, reason: str) -> None:
    with dial(str(knocking), 10) as sock:
        sock.settimeout(10)
        assert knock(sock, token) == reason


@pytest.mark.parametrize("noise", [b"\xff" * 8, b"\x01" + bytes(7) + b"ab"])
def test_a_knock_that_is_nonsense(knocking: Path, noise: bytes) -> None:
    with dial(str(knocking), 10) as sock:
        sock.settimeout(10)
        sock.sendall(rgcb.preface(rgcb.KNOCK) + noise)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(100):
                continue


@pytest.mark.parametrize("noise", [bytes(8), b"\xff" * 8, b"\x08" + bytes(15)])
def test_a_client_that_talks_nonsense_loses_the_connection(rig: Rig, noise: bytes) -> None:
    host = rig.host()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(rig.path))
        client.settimeout(10)
        client.sendall(rgcb.preface(host.nonce) + noise)
        received = client.recv(24, socket.MSG_WAITALL)
        # The end, or a reset where the head had not read everything.
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert received[8:9] == bytes([rgcb.HELLO])


def test_a_worker_that_ends_fails_its_calls(rig: Rig) -> None:
    host = rig.host()
    entered, leave = threading.Event(), threading.Event()
    callbacks = rig.callbacks(host, lambda x: (entered.set(), leave.wait(20), x)[2])
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(failure, callbacks, np.int32(1))
        assert entered.wait(10)
        rig.relay.close("the worker is ending")
        assert future.result(5).message == "the worker is ending"
    assert failure(callbacks, np.int32(1)).message == "the worker is ending"
    leave.set()
    host.close()


def test_the_head_that_goes_is_told_once(rig: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    host = rig.host()
    callbacks = rig.callbacks(host, lambda x: x)
    callbacks.functions[0](np.int32(1))
    until(lambda: host._greeted, "the greeting")
    rig.do(rig.head.close, host.nonce)
    until(lambda: host._threads == 0, "the connections to end")
    assert capfd.readouterr().err.count("is gone") == 1


def test_no_head_at_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from regrow.client.settings import Settings

    host = CallbackHost(Settings.of(tmp_path / "nobody.sock"))
    host.start()
    until(lambda: host._threads == 0, "the attempt to end")
    assert "cannot open a connection for host callbacks" in capfd.readouterr().err
    host.close()
    gc.collect()


def test_other_errors_of_xla_pass() -> None:
    assert user_error("INTERNAL: something else") is None
    found = user_error("INTERNAL: CpuCallback error: returned 2 values, INTERNAL fault")
    assert found is not None
    assert "INTERNAL" not in str(found)
