"""The outcomes of JAX's own tests, counted by file and by reason (see `jax_tests.py`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- written by benchmarks/jax_tests.py -->", "<!-- end -->"

# Why a test that passes on the CPU backend does not pass through Regrow: (reason, pattern of the test's
# name, pattern of its error). The first that fits counts.
REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "the device's memory is not in the client's process",
        "",
        "Only local arrays are supported|a PjRt-compatible backend only|buffer_callback hands device",
    ),
    (
        "`is_deleted` of an array that shares memory with a donated one",
        "test_fully_replicated_donated_array_is_deleted",
        "",
    ),
)
UNKNOWN = "not looked into"


@dataclass
class FileCount:
    """How the tests of one file came out."""

    collected: int = 0
    run: int = 0
    plain: int = 0
    through: int = 0
    aborted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["test"]: line for line in lines}


def reason_of(test: str, error: str) -> str:
    for reason, name, text in REASONS:
        if re.search(name, test) and re.search(text, error):
            return reason
    return UNKNOWN


def count(results: Path, file: str) -> FileCount:
    """Counts the outcomes of one file."""
    through = _read(results / f"{file}.regrow.jsonl")
    collected = results / f"{file}.collected"
    counted = FileCount(int(collected.read_text()) if collected.exists() else 0)
    for test, line in _read(results / f"{file}.plain.jsonl").items():
        ours = through.get(test)
        if line["outcome"] == "passed" and ours is None:
            continue  # The other side is still to come.
        counted.run += 1
        if line["outcome"] != "passed" or ours is None:
            continue
        counted.plain += 1
        if ours["outcome"] == "passed":
            counted.through += 1
        else:
            counted.aborted += ours["outcome"] == "aborted"
            counted.reasons[reason_of(test, ours["error"])] += 1
    return counted


def summary(results: Path, file: str) -> str:
    """One line about one file."""
    counted = count(results, file)
    parts = [f"{counted.through} of {counted.plain} pass"]
    parts += [f"{number} {reason}" for reason, number in counted.reasons.most_common()]
    return ", ".join(parts)


def write_table(results: Path, document: Path) -> None:
    """Writes the counts between the marks in a document."""
    files = sorted(path.name.removesuffix(".plain.jsonl") for path in results.glob("*.plain.jsonl"))
    counts = {file: count(results, file) for file in files}
    whole = FileCount()
    lines = [
        BEGIN,
        "",
        "| test file | tests | run here | pass on CPU | of these through Regrow |",
        "|---|--:|--:|--:|--:|",
    ]
    for file, one in counts.items():
        lines.append(f"| {file} | {one.collected} | {one.run} | {one.plain} | {one.through} |")
        whole.run += one.run
        whole.plain += one.plain
        whole.through += one.through
        whole.aborted += one.aborted
        whole.reasons += one.reasons
    lines.append(f"| **together** | | {whole.run} | {whole.plain} | {whole.through} |")
    lines += ["", f"Through Regrow: {_share(whole.through, whole.plain)}. "]
    lines[-1] += f"Tests that ended the client's process: {whole.aborted}."
    lines += ["", "| why the others do not pass | tests |", "|---|--:|"]
    lines += [f"| {reason} | {number} |" for reason, number in whole.reasons.most_common()]
    text = document.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(before + "\n".join([*lines, "", END]) + after, encoding="utf-8")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
