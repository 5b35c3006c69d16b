"""`record`: one line of a journal for each step, for whoever compares runs (`regrow prove`)."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import time
from collections.abc import Container, Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from regrow.elastic import planned, progress
from regrow.elastic.journal import (
    HASH_EVERY_VARIABLE,
    JOURNAL_VARIABLE,
    JournalWriter,
    Loss,
    RecordId,
    StepRecord,
)
from regrow.elastic.trees import Tree
from regrow.errors import UsageError

_HASH_BYTES: Final = 8
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_writer: JournalWriter | None = None


def record(step: int, loss: Any, state: Any = None, ids: Iterable[Any] | None = None) -> None:
    """Records what a training step came to, if somebody wants to know (`regrow prove` does).

    Otherwise it only says that the next step begins, as `at_step` does. Call it right behind the
    step: before the snapshot of that step, and before slices are taken in. A step that is taken
    again is recorded again.

    What is recorded is read, so then the call waits for the step, and the error of a lost slice may
    come from here. The whole state is read on each call, or as often as the proof is asked to.

    Args:
        step: The step, from 0.
        loss: Its loss, one number: an array of JAX or NumPy, or a float.
        state: The training state after it, any tree; None: only losses are compared.
        ids: Which records it was computed from: whole numbers or strings that are the same in each
            run, in their order (`ElasticLoader.record_ids`); None: they are not compared.

    Raises:
        UsageError: The step or the loss is not one number, an id is neither a whole number nor a string,
            or a leaf of the state has no content that runs could be compared by.
        JaxRuntimeError: A slice that holds a part of it was lost.
    """
    step = progress.whole(step)
    path = os.environ.get(JOURNAL_VARIABLE)
    plan = planned.follower()
    offer = None
    if plan is not None:
        offer = plan.before_record(step, _slices(loss, state))
    if path is not None:
        _journal(path).write(_made(step, loss, state, ids))
    if plan is not None and offer is not None:
        plan.offer(offer)
    progress.after_step(step)


def _made(step: int, loss: Any, state: Any, ids: Iterable[Any] | None) -> StepRecord:
    return StepRecord(
        step,
        _loss(loss),
        None if state is None or step % _hash_every() else _hashes(state),
        None if ids is None else tuple(_id(one) for one in ids),
        tuple(sorted(_slices(loss, state))) or None,
        time.time(),
    )


def _hash_every() -> int:
    return max(1, int(os.environ.get(HASH_EVERY_VARIABLE, "1")))


def _journal(path: str) -> JournalWriter:
    global _writer
    if _writer is None or _writer.path != path:
        _writer = JournalWriter(path)
    return _writer


def _loss(loss: Any) -> Loss:
    array = np.asarray(loss)
    if array.size != 1 or not _is_real(array.dtype):
        raise UsageError(f"the loss of a step is one number, not {array.dtype}{list(array.shape)}")
    # A number of Python has the bits of a float64, but who knows what it was before.
    dtype = array.dtype.name if hasattr(loss, "dtype") else "float"
    return Loss(dtype, array.tobytes().hex(), float(array.reshape(())))


def _is_real(dtype: np.dtype[Any]) -> bool:
    # The small types (bfloat16, int4) are none of NumPy's own.
    return bool(jnp.isdtype(dtype, ("bool", "integral", "real floating")))


def _id(one: Any) -> RecordId:
    if isinstance(one, str):
        return one
    try:
        return int(one.__index__())
    except (AttributeError, TypeError):
        raise UsageError(
            f"the id of a record is a whole number or a string, not a {type(one).__name__}"
        ) from None


def _slices(loss: Any, state: Any) -> set[int]:
    """The slices of the step; empty: unknown. The state may have moved since, the loss has not."""
    of_loss = _devices(loss)
    devices = of_loss if len(of_loss) > 1 else _devices(state) or of_loss
    return {device.slice_index for device in devices if hasattr(device, "slice_index")}


def _devices(tree: Any) -> set[Any]:
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return {device for array in arrays for device in array.sharding.device_set}


def _hashes(state: Any) -> dict[str, str]:
    tree = Tree.of(state)
    leaves = jax.device_get([_data(leaf) for leaf in tree.leaves])
    hashes: dict[str, str] = {}
    for path, leaf in zip(tree.paths, leaves, strict=True):
        hashes[_unique(path, hashes)] = _hash(path, leaf)
    return hashes


def _unique(path: str, taken: Container[str]) -> str:
    """Keys that hold "/" give two leaves one path."""
    names = itertools.chain([path], (f"{path} ({number})" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _data(leaf: Any) -> Any:
    """The numbers behind PRNG keys; all else as it is."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _hash(path: str, leaf: Any) -> str:
    """Dtype, shape and a hash of the bytes; of what is no array its type and a hash of its text."""
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        kind, content = f"{leaf.dtype.name}{list(leaf.shape)}", leaf.tobytes()
    else:
        kind, content = type(leaf).__name__, _text(path, leaf).encode()
    return f"{kind} {hashlib.blake2b(content, digest_size=_HASH_BYTES).hexdigest()}"


def _text(path: str, leaf: Any) -> str:
    text = repr(leaf)
    if _ADDRESS.search(text):
        raise UsageError(
            f"{path}: a {type(leaf).__name__} has no content that runs could be compared by, only an "
            "address; leave it out of the state that is recorded"
        )
    return text
