"""The coordination service on its socket, with grpcio's client at the other end."""

from __future__ import annotations

import contextlib
import gc
import socket
import stat
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from coordination_rig import Epoch, ServedCoordination
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.head import coordination_calls
from regrow.head.coordination import Wait
from regrow.wire import schema
from regrow.wire.unary import Unary
from waiting import until

WAIT_S = 20.0
SERVICE = "xla.coordination.CoordinationService"
messages = schema.coordination
ALL = [
    method.name for method in schema._the_pool().FindServiceByName(SERVICE).methods_by_name.values()
]


class Client:
    """A connection to a coordination service."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])

    def begin(self, method: str, data: bytes, timeout_s: float = WAIT_S) -> Any:
        return self.channel.unary_unary(f"/{SERVICE}/{method}").future(data, timeout=timeout_s)

    def call(self, method: str, **fields: Any) -> Any:
        request = getattr(messages, f"{method}Request")(**fields)
        data = self.begin(method, request.SerializeToString()).result()
        return getattr(messages, f"{method}Response").FromString(data)

    def join(self, epoch: Epoch, node: int) -> Any:
        """Registers; what all other calls carry."""
        answer = self.call("RegisterTask", source_task_id=epoch.keys[node], incarnation=node + 100)
        return messages.Incarnations(service_incarnation=answer.service_incarnation)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCoordination]:
    made = ServedCoordination(tmp_path_factory.mktemp("run") / "epochs.sock")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def client(served: ServedCoordination) -> Iterator[Client]:
    made = Client(served.coordination.address)
    yield made
    made.channel.close()


def waits(served: ServedCoordination, epoch: Epoch) -> int:
    return len(served.coordination._by_epoch[epoch.number]._waits)


def test_every_method_that_this_jaxlib_knows_is_there(client: Client) -> None:
    assert len(ALL) >= 14
    for method in ALL:
        call = client.begin(method, b"", 0.2)
        assert call.exception(WAIT_S) is None or call.code() is not grpc.StatusCode.UNIMPLEMENTED
    assert client.begin("Nonsense", b"").code() is grpc.StatusCode.UNIMPLEMENTED
    other = client.channel.unary_unary("/elsewhere/RegisterTask").future(b"")
    assert other.code() is grpc.StatusCode.UNIMPLEMENTED


def test_only_the_owner_reaches_it(served: ServedCoordination) -> None:
    assert stat.S_IMODE(served.socket.stat().st_mode) == 0o600


def test_a_connection_that_speaks_something_else_is_closed(served: ServedCoordination) -> None:
    for text in (b"RGCB\0\0\0\0" + b"0" * 16, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(str(served.socket))
            sock.sendall(text)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass


def test_a_wait_goes_with_its_caller(served: ServedCoordination, client: Client) -> None:
    epoch = served.open(2)
    key, epochs = epoch.keys[0], client.join(epoch, 0)
    requests = {
        "PollForError": messages.PollForErrorRequest(incarnations=epochs, source_task_id=key),
        "GetKeyValue": messages.GetKeyValueRequest(incarnations=epochs, key="never"),
        "WatchTasks": messages.WatchTasksRequest(incarnations=epochs, version_number=1),
        "Barrier": messages.BarrierRequest(
            incarnations=epochs, source_task_id=key, barrier_id="b", barrier_timeout_in_ms=60_000
        ),
        "GetAliveTasks": messages.GetAliveTasksRequest(
            incarnations=epochs, requesting_task_id=key, task_ids=[0, 1]
        ),
    }
    client.join(epoch, 1)  # Else the first would be all that are alive.
    requests["WatchTasks"].version_number = 2
    calls = [
        client.begin(method, request.SerializeToString()) for method, request in requests.items()
    ]
    until(lambda: waits(served, epoch) == len(calls), "all to wait")
    for call in calls[1:]:
        call.cancel()
    until(lambda: waits(served, epoch) == 1, "the cancelled ones to end")
    guest = Client(epoch.address)
    call = guest.begin("GetKeyValue", requests["GetKeyValue"].SerializeToString())
    until(lambda: waits(served, epoch) == 2, "the guest to wait")
    guest.channel.close()
    until(lambda: waits(served, epoch) == 1, "the guest to go")
    served.close(epoch)
    assert calls[0].code() is grpc.StatusCode.CANCELLED


def test_a_barrier_ends_at_its_deadline(served: ServedCoordination, client: Client) -> None:
    epoch = served.open(2)
    epochs = client.join(epoch, 0)
    for timeout_ms in (-5, 0, 50):
        with pytest.raises(grpc.RpcError) as caught:
            client.call(
                "Barrier",
                incarnations=epochs,
                source_task_id=epoch.keys[0],
                barrier_id="b",
                barrier_timeout_in_ms=timeout_ms,
            )
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert waits(served, epoch) == 0


def test_heartbeats_and_leaves_never_fail(served: ServedCoordination, client: Client) -> None:
    epoch = served.open(1)
    epochs = client.join(epoch, 0)
    served.close(epoch)
    for secret in (epochs.service_incarnation, 0, 12345):
        epochs.service_incarnation = secret
        answer = client.call("Heartbeat", incarnations=epochs, source_task_id=epoch.keys[0])
        assert answer.service_incarnation == secret
        client.call("ShutdownTask", incarnations=epochs, source_task_id=epoch.keys[0])
    stranger = client.call("RegisterTask", source_task_id=4711, incarnation=1)
    assert stranger.service_incarnation == 0


def test_members_are_told_by_their_nodes(served: ServedCoordination, client: Client) -> None:
    epoch = served.open(3)
    epochs = client.join(epoch, 2)
    answer = client.call("WatchTasks", incarnations=epochs, version_number=-1)
    states = [(task.task_id, task.incarnation, task.state) for task in answer.task_state]
    connected = messages.TaskState.Value("CONNECTED")
    assert [node for node, _, _ in states] == [0, 1, 2]
    assert states[2] == (2, 102, connected)
    assert connected not in (states[0][2], states[1][2])


def test_requests_are_bounded(
    served: ServedCoordination, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination_calls, "_REQUESTS_BYTES", 10_000)
    guest = Client(served.coordination.address)
    epoch = served.open(1)
    epochs = guest.join(epoch, 0)
    with pytest.raises(grpc.RpcError) as caught:
        entry = messages.KeyValueEntry(key="k", value=bytes(20_000))
        guest.call("InsertKeyValue", incarnations=epochs, kv=entry)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    entry.value = b"v"
    for _ in range(5):
        guest.call("InsertKeyValue", incarnations=epochs, kv=entry, allow_overwrite=True)
    guest.channel.close()


@pytest.mark.usefixtures("without_collector")
def test_a_call_that_was_answered_leaves_nothing(served: ServedCoordination) -> None:
    guest = Client(served.coordination.address)
    epoch = served.open(1)
    epochs = guest.join(epoch, 0)
    before = _calls_kept()
    poll = messages.PollForErrorRequest(incarnations=epochs, source_task_id=epoch.keys[0])
    waiting = guest.begin("PollForError", poll.SerializeToString())
    entry = messages.KeyValueEntry(key="k", value=b"v")
    guest.call("InsertKeyValue", incarnations=epochs, kv=entry)
    for _ in range(20):
        guest.call("GetKeyValue", incarnations=epochs, key="k")
    served.close(epoch)
    assert waiting.code() is grpc.StatusCode.CANCELLED
    guest.channel.close()
    until(lambda: _calls_kept() <= before, "the calls to be forgotten")


def _calls_kept() -> int:
    kinds = (coordination_calls._Call, Unary, Wait)
    return sum(type(one) in kinds for one in gc.get_objects())


@settings(max_examples=60)
@given(
    st.sampled_from(ALL),
    st.one_of(st.binary(max_size=60), st.lists(st.binary(max_size=9), max_size=4)),
    st.booleans(),
)
def test_nothing_that_comes_disturbs_the_others(
    served: ServedCoordination, client: Client, method: str, noise: Any, inside: bool
) -> None:
    epoch = served.open(2)
    epochs = client.join(epoch, 0)
    data = noise if isinstance(noise, bytes) else b"".join(_field(part) for part in noise)
    if inside:
        data = messages.HeartbeatRequest(incarnations=epochs).SerializeToString() + data
    client.begin(method, data, 0.02).exception(WAIT_S)
    entry = messages.KeyValueEntry(key="k", value=b"v")
    client.call("InsertKeyValue", incarnations=epochs, kv=entry, allow_overwrite=True)
    assert client.call("GetKeyValue", incarnations=epochs, key="k").kv.value == b"v"
    served.close(epoch)


def _field(part: bytes) -> bytes:
    """A field of a message: its number and kind from the first byte, then what follows."""
    return bytes((part[0] & 0x7F, len(part) - 1)) + part[1:] if part else b""
