"""Questions of a compilation, and shardings among them, as arrays and back."""

from __future__ import annotations

import numpy as np
import pytest
from jaxlib import xla_client as xc

from regrow.channel import partitioning, values
from regrow.channel.partitioning import Question, of_sharding, to_sharding
from regrow.errors import ProtocolError

REPLICATED = xc.HloSharding.replicate()
SPLIT = xc.HloSharding.iota_tile((2, 4))
PAIR = xc.HloSharding.tuple_sharding(xc.Shape.tuple_shape([]), [])


@pytest.mark.parametrize("sharding", [None, REPLICATED, SPLIT, PAIR])
def test_shardings(sharding: xc.HloSharding | None) -> None:
    assert to_sharding(of_sharding(sharding)) == sharding


def test_questions() -> None:
    f32, bf16 = np.dtype(np.float32), np.dtype("bool")
    question = Question(
        b"key \x00",
        [((2, 0), f32), ((), bf16)],
        [of_sharding(SPLIT), of_sharding(None)],
        [((3,), bf16)],
        True,
        of_sharding(REPLICATED),
    )
    for one in (question, Question(b""), Question(b"k", result_sharding=of_sharding(SPLIT))):
        sent = b"".join(values.encode(partitioning.to_arrays(one)))
        read = partitioning.from_arrays(values.decode(memoryview(sent)))
        assert [*map(list, read[1:4])] == [*map(list, one[1:4])]
        assert (read.key, read.tupled) == (one.key, one.tupled)
        assert read.result_sharding == one.result_sharding


def test_what_is_no_question() -> None:
    good = partitioning.to_arrays(Question(b"key", [((2,), np.dtype(np.float32))], [b""]))
    for bad in ([], [None], good[:-1], [*good, good[0]], [good[0], good[0], *good[2:]]):
        with pytest.raises(ProtocolError, match="malformed"):
            partitioning.from_arrays(bad)
