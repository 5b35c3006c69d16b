from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.channel.handshake import (
    LENGTH,
    MAX_HANDSHAKE_BYTES,
    HeadHandshake,
    Hello,
    Identity,
    WorkerHandshake,
    body_bytes,
    new_link_id,
    new_secret,
)
from regrow.errors import HandshakeError

SECRET = new_secret()
HELLO = Hello(Identity("worker", 1, 0, 3, 4711), new_link_id(), 1 << 40)


def body(message: bytes) -> bytes:
    size = body_bytes(message[: LENGTH.size])
    assert len(message) == LENGTH.size + size
    return message[LENGTH.size :]


def test_both_sides_learn_what_the_other_says() -> None:
    head, worker = HeadHandshake(SECRET), WorkerHandshake(SECRET, HELLO)
    hello = head.verify(body(worker.answer(body(head.challenge()))))
    welcome = worker.finish(body(head.welcome(17)))
    assert hello == HELLO
    assert welcome.last_received == 17


def test_a_worker_with_another_secret_is_refused_and_told_so() -> None:
    head, worker = HeadHandshake(SECRET), WorkerHandshake(new_secret(), HELLO)
    with pytest.raises(HandshakeError, match="the secret is not that of this cluster"):
        head.verify(body(worker.answer(body(head.challenge()))))
    with pytest.raises(HandshakeError, match="refuses this process: wrong"):
        worker.finish(body(head.refusal("wrong")))
    with pytest.raises(HandshakeError, match="nobody has proved"):
        head.welcome(0)


def test_a_head_that_does_not_know_the_secret_is_not_believed() -> None:
    worker = WorkerHandshake(SECRET, HELLO)
    impostor = HeadHandshake(SECRET)
    impostor.verify(body(worker.answer(body(impostor.challenge()))))
    impostor._secret = new_secret()
    with pytest.raises(HandshakeError, match="the head does not know the secret"):
        worker.finish(body(impostor.welcome(0)))


def test_a_recorded_answer_is_worth_nothing_to_another_connection() -> None:
    head, worker = HeadHandshake(SECRET), WorkerHandshake(SECRET, HELLO)
    answer = body(worker.answer(body(head.challenge())))
    with pytest.raises(HandshakeError):
        HeadHandshake(SECRET).verify(answer)


def test_a_workers_proof_cannot_be_played_back_as_the_heads() -> None:
    head, worker = HeadHandshake(SECRET), WorkerHandshake(SECRET, HELLO)
    answer = body(worker.answer(body(head.challenge())))
    fields, _nonce, proof = msgpack.unpackb(answer)
    with pytest.raises(HandshakeError):
        worker.finish(msgpack.packb([True, fields, proof]))


@pytest.mark.parametrize("change", [{"incarnation": 4}, {"slice_index": 0}, {"role": "compiler"}])
def test_a_changed_hello_does_not_carry_the_proof(change: dict[str, object]) -> None:
    head, worker = HeadHandshake(SECRET), WorkerHandshake(SECRET, HELLO)
    answer = msgpack.unpackb(body(worker.answer(body(head.challenge()))))
    other = Hello(dataclasses.replace(HELLO.identity, **change), HELLO.link_id, 0)  # type: ignore[arg-type]
    other_head = HeadHandshake(SECRET)
    answer[0] = msgpack.unpackb(
        body(WorkerHandshake(SECRET, other).answer(body(other_head.challenge())))
    )[0]
    with pytest.raises(HandshakeError):
        head.verify(msgpack.packb(answer))


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_by_both_sides(data: bytes) -> None:
    with pytest.raises(HandshakeError):
        HeadHandshake(SECRET).verify(data)
    worker = WorkerHandshake(SECRET, HELLO)
    with pytest.raises(HandshakeError):
        worker.answer(data)
    with pytest.raises(HandshakeError):
        worker.finish(data)


fields = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 5), st.binary(max_size=40), st.text(max_size=5)
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(value=fields)
def test_msgpack_of_other_shapes_is_refused(value: object) -> None:
    with pytest.raises(HandshakeError):
        HeadHandshake(SECRET).verify(msgpack.packb(value))


@pytest.mark.parametrize(
    "hello",
    [
        Hello(dataclasses.replace(HELLO.identity, slice_index=-1), HELLO.link_id, 0),
        Hello(HELLO.identity, b"short", 0),
        Hello(HELLO.identity, HELLO.link_id, -1),
        Hello(dataclasses.replace(HELLO.identity, role="boss"), HELLO.link_id, 0),  # type: ignore[arg-type]
    ],
)
def test_a_proved_hello_with_fields_out_of_range_is_refused(hello: Hello) -> None:
    head, worker = HeadHandshake(SECRET), WorkerHandshake(SECRET, hello)
    with pytest.raises(HandshakeError, match="fields out of range"):
        head.verify(body(worker.answer(body(head.challenge()))))


def test_deeply_nested_bytes_do_no_harm() -> None:
    with pytest.raises(HandshakeError):
        HeadHandshake(SECRET).verify(b"\x91" * 60_000)


@pytest.mark.parametrize("size", [0, MAX_HANDSHAKE_BYTES + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_is_not_believed(size: int) -> None:
    with pytest.raises(HandshakeError, match=f"a message of {size} bytes"):
        body_bytes(LENGTH.pack(size))


def test_another_version_is_refused_by_the_worker() -> None:
    worker = WorkerHandshake(SECRET, HELLO)
    with pytest.raises(HandshakeError, match="the head speaks version 99"):
        worker.answer(msgpack.packb([99, b"n" * 32]))


def test_a_long_reason_is_cut_and_arrives() -> None:
    head, worker = HeadHandshake(SECRET), WorkerHandshake(SECRET, HELLO)
    with pytest.raises(HandshakeError, match="refuses this process: xxx"):
        worker.finish(body(head.refusal("x" * 100_000)))
