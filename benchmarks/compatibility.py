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
REASONS: tuple[tuple[str, str, str], ...] = ()
UNKNOWN = "not looked into"


@dataclass
class FileCount:
    """How the tests of one file came out."""

    plain: int = 0
    through: int = 0
    aborted: int = 0
    left: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return self.plain - self.through - self.left


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
    counted = FileCount()
    for test, line in _read(results / f"{file}.plain.jsonl").items():
        if line["outcome"] != "passed":
            continue
        counted.plain += 1
        ours = through.get(test)
        if ours is None:
            counted.left += 1
        elif ours["outcome"] == "passed":
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
    lines = [
        BEGIN,
        "",
        "| test file | pass on CPU | of these through Regrow | share | not |",
        "|---|--:|--:|--:|---|",
    ]
    whole = FileCount()
    for file, one in counts.items():
        ran = one.plain - one.left
        why = "; ".join(f"{number} {reason}" for reason, number in one.reasons.most_common())
        lines.append(f"| {file} | {ran} | {one.through} | {_share(one.through, ran)} | {why} |")
        whole.plain += ran
        whole.through += one.through
        whole.reasons += one.reasons
    lines.append(
        f"| **all** | **{whole.plain}** | **{whole.through}** | "
        f"**{_share(whole.through, whole.plain)}** | |"
    )
    lines += ["", "| reason | tests |", "|---|--:|"]
    lines += [f"| {reason} | {number} |" for reason, number in whole.reasons.most_common()]
    text = document.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(before + "\n".join([*lines, "", END]) + after, encoding="utf-8")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
