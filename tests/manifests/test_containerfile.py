"""The Containerfile, as far as it can be read without building it."""

from __future__ import annotations

import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]


def steps() -> list[tuple[str, list[str]]]:
    """Each instruction and its words."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], shlex.split(line)[1:]) for line in lines]


def test_everything_it_copies_is_there() -> None:
    copied = [word for kind, words in steps() if kind == "COPY" for word in words[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name


def test_everything_that_the_build_reads_is_copied() -> None:
    copied = {word for kind, words in steps() if kind == "COPY" for word in words[:-1]}
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= copied


def test_it_does_not_run_as_root() -> None:
    users = [words[0] for kind, words in steps() if kind == "USER"]
    assert users == ["regrow"]
