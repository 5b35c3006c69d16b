from __future__ import annotations

import asyncio
import gc
import json
import socket
import stat
import threading
from pathlib import Path

import pytest

from regrow.control import (
    ControlConnection,
    error_from_json,
    error_to_json,
    request,
)
from regrow.control_aio import LineServer
from regrow.errors import (
    ClusterError,
    Code,
    ControlError,
    NoClusterError,
    OptionError,
    StatusError,
    UsageError,
    WaitTimeout,
)
from regrow.head.control import ControlServer, make_event


class FakeHead:
    """A head that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.healthy = asyncio.Event()
        self.end = asyncio.Event()

    def status(self):
        return {"slices": []}

    async def kill(self, index):
        await asyncio.sleep(0.01)
        self.asked.append(("kill", index))

    def stop(self, index):
        self.asked.append(("stop", index))

    def cont(self, index):
        raise ClusterError(f"slice {index} is lost")

    def restore(self, index):
        raise ZeroDivisionError("a bug")

    async def wait_healthy(self, timeout_s):
        try:
            async with asyncio.timeout(timeout_s):
                await self.healthy.wait()
        except TimeoutError:
            raise WaitTimeout("slice 1", timeout_s) from None

    async def wait_client(self, timeout_s):
        raise WaitTimeout("a client", timeout_s)

    def progress(self, step, phase):
        self.asked.append((phase, step))

    def shutdown(self):
        self.end.set()


class Served:
    """A control server on a loop in a thread of its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.thread.start()
        assert self.ready.wait(5)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.head = FakeHead()
        self.server = ControlServer(self.head, self.path)
        await self.server.start()
        self.ready.set()
        await self.head.end.wait()
        await self.server.close()

    def do(self, function, *arguments) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        if self.thread.is_alive():
            self.do(self.head.end.set)
        self.thread.join(5)
        assert not self.thread.is_alive()


@pytest.fixture
def served(tmp_path):
    served = Served(str(tmp_path / "control.sock"))
    yield served
    served.close()
    assert not Path(served.path).exists()


def test_requests_and_answers(served):
    assert request(served.path, "status") == {"slices": []}
    assert request(served.path, "kill", index=2) is None
    request(served.path, "stop", index=0)
    request(served.path, "progress", step=9, phase="load")
    request(served.path, "progress")
    assert served.head.asked == [("kill", 2), ("stop", 0), ("load", 9), (None, None)]


def test_only_the_owner_can_open_it(served):
    assert stat.S_IMODE(Path(served.path).stat().st_mode) == 0o600


def test_errors_keep_their_class(served):
    with pytest.raises(ClusterError, match=r"^slice 1 is lost$"):
        request(served.path, "cont", index=1)
    with pytest.raises(UsageError, match="'one' is no index"):
        request(served.path, "kill", index="one")
    with pytest.raises(UsageError, match="True is no index"):
        request(served.path, "kill", index=True)
    for params in ({"step": "9"}, {"step": True}, {"step": -1}, {"phase": "a b"}, {"phase": 3}):
        with pytest.raises(UsageError, match=r"is no (step|phase)"):
            request(served.path, "progress", **params)
    with pytest.raises(UsageError, match="no control method 'fly'"):
        request(served.path, "fly")


def test_a_bug_is_told_and_does_not_end_the_server(served):
    with pytest.raises(ControlError, match="ZeroDivisionError: a bug"):
        request(served.path, "restore", index=1)
    assert request(served.path, "status") == {"slices": []}


def test_a_wait_ends_at_the_deadline_or_before(served):
    with pytest.raises(WaitTimeout, match=r"^waited 0.05 s for slice 1$") as raised:
        request(served.path, "wait_healthy", timeout_s=0.05)
    assert raised.value.what == "slice 1"
    threading.Timer(0.05, served.do, [served.head.healthy.set]).start()
    request(served.path, "wait_healthy", timeout_s=5)


def test_answers_do_not_wait_for_each_other(served):
    with ControlConnection(served.path) as connection:
        first = connection.send("wait_healthy", timeout_s=5)
        assert connection.call("status") == {"slices": []}
        served.do(served.head.healthy.set)
        answers: list[dict] = []
        while not answers:
            _, answers = connection.take()
        assert answers == [{"id": first, "result": None}]


def test_events(served):
    with ControlConnection(served.path) as connection:
        connection.subscribe()
        lost = make_event("slice_lost", slice_index=1, incarnation=2, text="it died", took_s=3.0)
        served.do(served.server.publish, lost)
        connection.call("status")
        events, answers = connection.take()
        while not events:
            events, answers = connection.take()
        assert events == [lost]
        assert answers == []


def test_a_subscriber_that_does_not_read_is_dropped(served):
    with ControlConnection(served.path) as connection:
        connection.subscribe()
        event = make_event("slice_lost", text="x" * 100_000)
        for _ in range(40):
            served.do(served.server.publish, event)
        request(served.path, "status")
        with pytest.raises(ControlError):
            while True:
                connection.call("status", timeout_s=5)


def test_shutdown_is_answered_first(served):
    request(served.path, "shutdown")
    served.thread.join(5)
    with pytest.raises(NoClusterError, match="it is not running"):
        request(served.path, "status")


def test_whoever_waits_is_told_of_the_end(served):
    errors: list[Exception] = []

    def wait(connection: ControlConnection) -> None:
        try:
            connection.call("wait_healthy", timeout_s=5)
        except ControlError as error:
            errors.append(error)

    with ControlConnection(served.path) as connection:
        connection.call("status")
        waiter = threading.Thread(target=wait, args=(connection,))
        waiter.start()
        served.close()
        waiter.join(5)
    assert len(errors) == 1


def test_a_connection_that_ends_before_its_wait_begins():
    begun = []

    async def wait() -> None:
        begun.append(1)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        reader.feed_data(b'{"id": 1, "method": "wait"}\n')
        reader.feed_eof()
        server = LineServer(None, lambda peer, method, params: wait())
        await server.converse(reader, writer)
        await server.close()
        theirs.close()

    asyncio.run(main())
    gc.collect()  # A coroutine that nobody has awaited warns when it goes, and a warning is an error.
    assert not begun


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"no json\n", "no JSON"),
        (b"[1]\n", "no JSON object"),
        (b'{"id": 1, "method": "kill", "params": 3}\n', "are no object"),
        (b'{"id": 1, "method": "wait_healthy", "params": {"timeout_s": "x"}}\n', "no timeout"),
        (b"x" * 70_000, "longer than"),
    ],
)
def test_bad_requests_are_one_clear_error(served, line, text):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(served.path)
        sock.sendall(line)
        answer = json.loads(sock.makefile().readline())
        assert text in answer["error"]["message"]
    assert request(served.path, "status") == {"slices": []}


def test_a_head_that_does_not_answer_is_one_clear_error(tmp_path):
    path = str(tmp_path / "control.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with pytest.raises(ControlError, match="did not answer 'status' in time"):
            request(path, "status", timeout_s=0.1)


def test_nobody_there_is_one_clear_error(tmp_path):
    with pytest.raises(NoClusterError, match="no head answers at"):
        request(str(tmp_path / "control.sock"), "status")


@pytest.mark.parametrize(
    "error",
    [
        UsageError("a"),
        OptionError("slices", "is 0; it must not"),
        ClusterError("b"),
        NoClusterError("c"),
        WaitTimeout("d", 2.5),
    ],
)
def test_errors_survive_the_way(error):
    again = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_errors_of_an_unknown_kind():
    assert isinstance(error_from_json({"type": "Strange", "message": "x"}), ControlError)
    assert isinstance(error_from_json("text"), ControlError)
    assert isinstance(error_from_json({"type": "Code", "message": "x"}), ControlError)
    status = StatusError(Code.ABORTED, "no")
    assert str(error_from_json(error_to_json(status))) == str(status)
