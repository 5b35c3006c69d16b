"""Errors on their way to a JAX client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import (
    SLICE_DOWN_WORDS,
    Code,
    ResourceError,
    SliceLostError,
    StatusError,
    UnsupportedError,
)
from regrow.wire import schema, status


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("INVALID_ARGUMENT: foo", Code.INVALID_ARGUMENT, "foo"),
        ("RESOURCE_EXHAUSTED: Out of memory: 3\nlines\n", Code.RESOURCE_EXHAUSTED, None),
        ("UNIMPLEMENTED: a: b", Code.UNIMPLEMENTED, "a: b"),
        ("jax.errors.JaxRuntimeError: ABORTED: foo", Code.ABORTED, "foo"),
        ("UNKNOWN: ", Code.UNKNOWN, ""),
        ("CANCELLED", Code.CANCELLED, ""),
        # XLA's own fault, but no lost slice
        ("INTERNAL: foo", Code.UNKNOWN, "internal: foo"),
        ("DEADLINE_EXCEEDED: foo", Code.UNKNOWN, "deadline_exceeded: foo"),
        ("DATA_LOSS: foo", Code.UNKNOWN, "data_loss: foo"),
        ("NOT_FOUND: no custom call", Code.INVALID_ARGUMENT, "not_found: no custom call"),
        ("INVALID_ARGUMENT: an INTERNAL thing", Code.INVALID_ARGUMENT, "an internal thing"),
        # not in the form of absl
        ("INVALID_ARGUMENTS: foo", Code.UNKNOWN, "RuntimeError: INVALID_ARGUMENTS: foo"),
        ("INVALID_ARGUMENT:foo", Code.UNKNOWN, "RuntimeError: INVALID_ARGUMENT:foo"),
        ("OK: foo", Code.UNKNOWN, "RuntimeError: OK: foo"),
        ("said INTERNAL: foo", Code.UNKNOWN, "RuntimeError: said internal: foo"),
        ("", Code.UNKNOWN, "RuntimeError"),
    ],
)
def test_text_of_an_exception(text: str, code: Code, message: str | None) -> None:
    error = status.from_exception(RuntimeError(text))
    assert error.code is code
    assert error.message == (text.partition(": ")[2] if message is None else message)


@pytest.mark.parametrize(
    "error", [StatusError(Code.INTERNAL, "x"), SliceLostError(1, 2, "is lost")]
)
def test_status_error_stays(error: StatusError) -> None:
    assert status.from_exception(error) is error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ResourceError("shared memory", 10, 5), Code.RESOURCE_EXHAUSTED),
        (MemoryError(), Code.RESOURCE_EXHAUSTED),
        (UnsupportedError("no"), Code.UNIMPLEMENTED),
        (NotImplementedError("no"), Code.UNIMPLEMENTED),
        (KeyError("NOT_FOUND"), Code.UNKNOWN),
        (KeyboardInterrupt(), Code.UNKNOWN),
    ],
)
def test_type_of_an_exception(error: BaseException, code: Code) -> None:
    found = status.from_exception(error)
    assert found.code is code
    assert found.message


@given(st.text(), st.sampled_from(["", *SLICE_DOWN_WORDS]), st.sampled_from(["", ": "]), st.text())
def test_no_exception_looks_like_a_lost_slice(a: str, word: str, colon: str, b: str) -> None:
    error = status.from_exception(ValueError(f"{word}{colon}{a}{word}{b}"))
    shown = f"{error.code.name}: {error.message}"
    assert not any(word in shown for word in SLICE_DOWN_WORDS)


def test_long_messages_keep_both_ends() -> None:
    error = status.from_exception(RuntimeError(f"INVALID_ARGUMENT: begin{'x' * 10**6}end"))
    assert error.message.startswith("begin")
    assert error.message.endswith("end")
    assert "characters left out" in error.message
    assert len(error.message) < status.MAX_MESSAGE_CHARS + 100


@given(st.sampled_from([code for code in Code if code is not Code.OK]), st.text())
def test_proto_round_trip(code: Code, message: str) -> None:
    proto = schema.tensorflow.StatusProto()
    status.fill(proto, StatusError(code, message))
    again = status.from_proto(schema.tensorflow.StatusProto.FromString(proto.SerializeToString()))
    assert again is not None
    assert again.code is code
    assert again.message == message.encode("utf-8", "replace").decode("utf-8")


def test_text_that_is_no_unicode_still_goes_out() -> None:
    proto = schema.tensorflow.StatusProto()
    status.fill(proto, StatusError(Code.UNKNOWN, "file \udcff"))
    assert proto.message == "file ?"


def test_ok_is_no_error() -> None:
    assert status.from_proto(schema.tensorflow.StatusProto()) is None


def test_code_from_the_future() -> None:
    proto = schema.tensorflow.StatusProto(message="x")
    proto.MergeFromString(b"\x08\x63")  # code 99
    error = status.from_proto(proto)
    assert error is not None
    assert error.code is Code.UNKNOWN


def test_slice_loss_keeps_its_code() -> None:
    proto = schema.tensorflow.StatusProto()
    status.fill(proto, SliceLostError(1, 2, "is lost"))
    assert (proto.code, proto.message) == (int(Code.DATA_LOSS), "slice 1 is lost")
