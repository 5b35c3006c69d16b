from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.launchers.template import HEADER, MAX_FRAME_BYTES, pack, unpack

MESSAGES = st.lists(
    st.dictionaries(st.text(max_size=5), st.one_of(st.integers(0, 2**60), st.binary(max_size=20)))
)


@settings(max_examples=50, deadline=None)
@given(MESSAGES, st.integers(1, 40))
def test_frames_survive_any_cut(messages, size):
    wire = b"".join(pack(message) for message in messages)
    buffer = bytearray()
    received = []
    for start in range(0, len(wire), size):
        buffer += wire[start : start + size]
        received += unpack(buffer)
    assert received == messages
    assert not buffer


def test_a_frame_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="too long"):
        unpack(bytearray(HEADER.pack(MAX_FRAME_BYTES + 1)))
    with pytest.raises(ValueError, match="too long"):
        pack({"spec": b"x" * (MAX_FRAME_BYTES + 1)})
