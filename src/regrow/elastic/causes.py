"""`explain`: what is behind an error that says DATA_LOSS.

The text of such an error is written for people (`regrow.slices.describe`); it is also all that a JAX
program gets. So it follows a grammar, and this reads it. No JAX is needed here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias, final

Kind: TypeAlias = Literal["killed", "crashed", "hung", "cut off", "not up", "links", "other"]

_LOST = re.compile(
    r"slice (?P<slice>\d+) (?P<what>was lost|did not start): (?P<cause>.+) "
    r"\(incarnation (?P<incarnation>\d+), at (?P<at>[\d:.T-]+Z)(?P<facts>;[^()]*)\)"
)
_NOT_UP = re.compile(r"slice (?P<slice>\d+) (?P<cause>is not there: [^(\n]*)")
_LINKS = re.compile(
    r"slice (?P<slice>\d+) (?P<cause>(?:gave up|lost) its collective links .*?) in epoch \d+;"
    r".*?Cause: (?P<detail>[^\n]*)",
    re.DOTALL,
)
_LAST_SEEN = re.compile(r"last heard (?P<value>[\d.]+) s before")
_STEP = re.compile(r"\bstep (?P<value>\d+)")
_PHASE = re.compile(r"\bphase (?P<value>[\w-]+)")
_KINDS: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    ("hung", re.compile(r"sent no heartbeat")),
    ("cut off", re.compile(r"had no connection")),
    ("killed", re.compile(r"killed on request|ended by SIG(?:KILL|TERM|INT|HUP)\b")),
    # A process that ends itself, or is ended for what it did, will do so again.
    ("crashed", re.compile(r"ended by SIG[A-Z0-9+]+|ended with exit status|reported:")),
)


@final
@dataclass(frozen=True, slots=True)
class SliceLoss:
    """Why an array or a program is lost.

    Attributes:
        slice_index: The slice; of collective links that broke, the first of those they joined.
        incarnation: The incarnation of it that was lost; None where the text does not tell.
        kind: "killed" (from outside), "crashed" (by itself), "hung", "cut off" (no connection),
            "not up" (it was not there yet), "links" (all slices live, a program is lost), "other".
        cause: The cause in words.
        at: When the slice was lost, in seconds since 1970; None if unknown.
        last_seen_s: How long before its loss the slice was last heard, in seconds; None if unknown.
        phase: What the program was doing (see `regrow.elastic.phase`); None if it never said so.
        step: The training step that it was in (see `regrow.elastic.at_step`); None likewise.
    """

    slice_index: int
    incarnation: int | None
    kind: Kind
    cause: str
    at: float | None = None
    last_seen_s: float | None = None
    phase: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        number = "" if self.incarnation is None else f", incarnation {self.incarnation},"
        where = "" if self.step is None else f" in step {self.step}"
        doing = "" if self.phase is None else f" ({self.phase})"
        if self.kind in ("links", "not up"):
            return f"slice {self.slice_index}{number}{where}{doing} {self.cause}"
        seen = "" if self.last_seen_s is None else f", last heard {self.last_seen_s:g} s before"
        return f"slice {self.slice_index}{number} was lost{where}{doing}: {self.cause}{seen}"


def explain(error: BaseException | str) -> SliceLoss | None:
    """The typed cause of an error that a lost slice has led to.

    Args:
        error: The error, or its text. Of an exception also what it was raised from is looked at.

    Returns:
        The cause; None for an error that Regrow did not make for a lost slice.
    """
    for text in _texts(error):
        loss = _parse(text)
        if loss is not None:
            return loss
    return None


def _texts(error: BaseException | str) -> Iterator[str]:
    seen: set[int] = set()
    while not isinstance(error, str):
        seen.add(id(error))
        yield str(error)
        earlier = error.__cause__ or error.__context__
        if earlier is None or id(earlier) in seen:
            return
        error = earlier
    yield error


def _parse(text: str) -> SliceLoss | None:
    if "DATA_LOSS" not in text:
        return None
    if match := _LOST.search(text):
        return _lost(match)
    if match := _LINKS.search(text):
        return SliceLoss(
            int(match["slice"]), None, "links", f"{match['cause']}: {match['detail'].strip()}"
        )
    if match := _NOT_UP.search(text):
        return SliceLoss(int(match["slice"]), None, "not up", match["cause"].strip())
    return None


def _lost(match: re.Match[str]) -> SliceLoss:
    cause, facts = match["cause"], match["facts"]
    seen, step, phase = (pattern.search(facts) for pattern in (_LAST_SEEN, _STEP, _PHASE))
    kind: Kind = "not up" if match["what"] == "did not start" else _kind(cause)
    return SliceLoss(
        slice_index=int(match["slice"]),
        incarnation=int(match["incarnation"]),
        kind=kind,
        cause=cause if kind != "not up" else f"did not start: {cause}",
        at=_utc_s(match["at"]),
        last_seen_s=float(seen["value"]) if seen else None,
        phase=phase["value"] if phase else None,
        step=int(step["value"]) if step else None,
    )


def _utc_s(text: str) -> float | None:
    # Foreign text may look like a time and be none.
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _kind(cause: str) -> Kind:
    return next((kind for kind, pattern in _KINDS if pattern.search(cause)), "other")
