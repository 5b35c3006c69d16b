"""The words of a story."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import SLICE_DOWN_WORDS
from regrow.slices.story import Story, clean, exit_phrase, host_name, seconds


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.0, "0 s"),
        (-1.0, "0 s"),
        (0.004, "0 s"),
        (0.02, "0.02 s"),
        (5.0, "5 s"),
        (9.5, "9.5 s"),
        (10.04, "10 s"),
        (99.96, "100 s"),
        (120.0, "120 s"),
        (3600.0, "3600 s"),
    ],
)
def test_seconds(value_s: float, text: str) -> None:
    assert seconds(value_s) == text


@given(st.text() | st.lists(st.sampled_from([*SLICE_DOWN_WORDS, " ", "\n"])).map("".join))
def test_clean_text_is_one_short_line_without_those_words(text: str) -> None:
    line = clean(text)
    assert len(line) <= 300
    assert line.isprintable()
    assert not any(word in line for word in SLICE_DOWN_WORDS)
    assert clean(line) == line


def test_phrases() -> None:
    assert host_name(1, None) == "host 1"
    assert host_name(1, 5) == "host 1 (pid 5)"
    assert exit_phrase("SIGRTMIN+3 (signal 37)") == "was ended by SIGRTMIN+3"
    assert exit_phrase("exit status 0") == "ended with exit status 0"


def test_a_story_keeps_its_last_lines() -> None:
    story = Story(3)
    for at in range(5):
        story.add(float(at), 1, f"line {at}")
    assert [line.text for line in story.lines] == ["line 2", "line 3", "line 4"]
    assert story.dropped == 2
    assert story.told(5.0, last=2) == "2 s ago [1] line 3; 1 s ago [1] line 4"
    assert story.entries(5.0)[0] == {"ago_s": 3.0, "incarnation": 1, "text": "line 2"}
