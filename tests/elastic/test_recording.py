"""`record` on arrays of plain JAX: what is hashed and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regrow.elastic import progress, record
from regrow.elastic.journal import HASH_EVERY_VARIABLE, JOURNAL_VARIABLE, read_journal
from regrow.errors import UsageError


@pytest.fixture
def journal(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    monkeypatch.setenv(JOURNAL_VARIABLE, str(path))
    return path


def test_nothing_is_written_or_read_unless_asked_for(monkeypatch):
    monkeypatch.delenv(JOURNAL_VARIABLE, raising=False)
    record(4, "no number", object(), [object()])
    assert progress.current().step == 5


def test_a_step_is_recorded_with_every_bit(journal):
    state = {"w": jnp.arange(3.0), "key": jax.random.key(1), "name": "adam", "count": 3}
    record(0, jnp.float32(0.1), state, range(2))
    record(
        1, np.float64(0.1), state | {"w": jnp.arange(3.0).at[1].set(np.nextafter(1, 2, dtype="f"))}
    )
    record(2, 0.1)
    one, other, last = read_journal(journal)
    assert (one.step, one.ids, one.loss.dtype, one.loss.bits) == (0, (0, 1), "float32", "cdcccc3d")
    assert (other.loss.dtype, other.ids) == ("float64", None)
    assert (last.loss.dtype, last.loss.value, last.state) == ("float", 0.1, None)
    assert set(one.state) == {"w", "key", "name", "count"}
    assert one.state["w"].startswith("float32[3] ")
    assert {path for path in one.state if one.state[path] != other.state[path]} == {"w"}


def test_the_state_may_be_hashed_now_and_then(journal, monkeypatch):
    monkeypatch.setenv(HASH_EVERY_VARIABLE, "3")
    for step in range(7):
        record(step, 0.5, {"w": np.zeros(2)}, [step])
    hashed = {one.step for one in read_journal(journal) if one.state is not None}
    assert hashed == {0, 3, 6}
    assert all(one.ids == (one.step,) for one in read_journal(journal))


def test_dtype_and_shape_are_part_of_a_leaf(journal):
    for leaf in (np.zeros(4, np.float32), np.zeros((2, 2), np.float32), np.zeros(4, np.int32)):
        record(0, 1.0, [leaf])
    assert len({one.state["0"] for one in read_journal(journal)}) == 3


def test_ids_may_be_arrays_and_strings(journal):
    record(0, 1.0, ids=np.arange(2))
    record(1, 1.0, ids=["a", "b"])
    assert [one.ids for one in read_journal(journal)] == [(0, 1), ("a", "b")]


@pytest.mark.parametrize("loss", [jnp.zeros(2), np.zeros((1, 0)), 1j, "0.5", None])
def test_a_loss_is_one_number(journal, loss):
    with pytest.raises(UsageError, match=r"the loss of a step is one number, not [\w<]+\["):
        record(0, loss)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "bool"])
def test_a_loss_may_have_any_real_type(journal, dtype):
    record(0, jnp.ones((), dtype))
    (one,) = read_journal(journal)
    assert (one.loss.dtype, one.loss.value) == (dtype, 1.0)


def test_an_id_is_a_number_or_a_string(journal):
    with pytest.raises(UsageError, match="a whole number or a string, not a float"):
        record(0, 1.0, ids=[1.5])


def test_leaves_of_one_path_are_told_apart(journal):
    record(0, 1.0, {"a/b": np.zeros(2), "a": {"b": np.ones(2)}})
    (one,) = read_journal(journal)
    assert set(one.state) == {"a/b", "a/b (2)"}
    assert len(set(one.state.values())) == 2


@pytest.mark.parametrize(
    ("leaf", "kind"), [(object(), "object"), (np.array([object()], dtype=object), "ndarray")]
)
def test_an_address_is_no_content(journal, leaf, kind):
    with pytest.raises(UsageError, match=f"^model/f: a {kind} has no content that runs could be"):
        record(0, 1.0, {"model": {"f": leaf}})
