"""Whether to try again, and when: the memory of `elastic_retry`. No I/O and no clock.

    machine = RetryMachine(budget=10)
    verdict = machine.failed(Failure(...))      # then: the retry policy, the pause, the next attempt

A loss of a slice is always worth another attempt. An error that says it may be one, or a slice that
ended by itself, may as well be the program's own doing; if it comes back at the same place, it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from regrow.elastic.causes import SliceLoss, explain
from regrow.elastic.progress import Progress

FailureKind: TypeAlias = Literal["scale-up", "lost", "crashed", "unexplained"]

_MAX_SIGNATURE_CHARS: Final = 400
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?")
# How often in a row the same failure at the same place is borne. An error that names no lost slice
# is either of the moment or of the program; a slice that crashes may have met a rare fault twice.
_BORNE: Final[dict[FailureKind, int]] = {"unexplained": 1, "crashed": 2}
# Without a step "the same place" is a guess, so more is borne.
_BORNE_BLINDLY: Final[dict[FailureKind, int]] = {"unexplained": 2, "crashed": 5}


@final
@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause before another attempt that follows one without any progress.

    Attributes:
        first_s: After the second failure at the same place, in seconds; after the first there is
            none. It doubles with each further one.
        limit_s: The longest pause.
    """

    first_s: float = 0.5
    limit_s: float = 30.0

    def pause_s(self, failures: int) -> float:
        """The pause after so many failures without progress between them."""
        if failures < 2:
            return 0.0
        return min(self.first_s * 2.0 ** min(failures - 2, 60), self.limit_s)


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that ended.

    Attributes:
        kind: "scale-up" is no failure; "unexplained" is an error whose words mean a lost slice, but
            that names none.
        text: Its cause in words.
        signature: What two equal errors have in common.
        place: How far the program had come.
    """

    kind: FailureKind
    text: str
    signature: str
    place: tuple[int | None, int | None]

    @classmethod
    def of(cls, error: Exception, progress: Progress) -> Failure:
        """From an error that pathwaysutils takes for that of a lost slice."""
        loss = explain(error)
        text = str(error)
        place = (progress.step, progress.snapshot)
        signature = _NUMBER.sub("#", text)[:_MAX_SIGNATURE_CHARS]
        if loss is None:
            kind: FailureKind = "lost" if "DATA_LOSS" in text else "unexplained"
            return cls(kind, text.splitlines()[0][:300] if text else "no text", signature, place)
        return cls(_kind(loss), _told(loss, progress), _NUMBER.sub("#", loss.cause), place)

    @classmethod
    def scale_up(cls, progress: Progress) -> Failure:
        """From a `ScaleUpSignalError`."""
        place = (progress.step, progress.snapshot)
        return cls("scale-up", "slices have come back", "scale-up", place)


def _kind(loss: SliceLoss) -> FailureKind:
    return "crashed" if loss.kind == "crashed" else "lost"


def _told(loss: SliceLoss, progress: Progress) -> str:
    if loss.step is not None or progress.step is None:
        return str(loss)
    return f"{loss} (the program was in step {progress.step})"


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from a failure.

    Attributes:
        text: Attempt, cause and budget, in words.
        pause_s: How long to wait before the next attempt, in seconds.
        refusal: Why there must be none; None: there may be one.
    """

    text: str
    pause_s: float
    refusal: str | None


@final
class RetryMachine:
    """The attempts of one run of a decorated function.

    Args:
        budget: How many attempts the retry policy allows; None: no limit, or it does not say.
        backoff: The pauses.

    Attributes:
        attempt: The number of the present attempt, from 1.
        last: What ended the one before, in words; None in the first.
    """

    def __init__(self, budget: int | None = None, backoff: Backoff | None = None) -> None:
        self.attempt = 1
        self.last: str | None = None
        self._budget = budget
        self._backoff = backoff or Backoff()
        self._former: Failure | None = None
        self._standing = 0
        self._repeats = 0

    @property
    def name(self) -> str:
        """The present attempt with its budget."""
        if self._budget is None:
            return f"attempt {self.attempt} (no limit)"
        return f"attempt {self.attempt} of at most {self._budget}"

    def failed(self, failure: Failure) -> Verdict:
        """Takes the end of the present attempt; call `next` if another one begins."""
        self.last = failure.text
        former = self._former
        self._former = failure
        if failure.kind == "scale-up":
            self._standing = self._repeats = 0
            return Verdict(f"{self.name} ends: {failure.text}", 0.0, None)
        stood = former is not None and former.place == failure.place
        again = stood and former is not None and former.signature == failure.signature
        self._standing = self._standing + 1 if stood else 1
        self._repeats = self._repeats + 1 if again else 1
        pause_s = self._backoff.pause_s(self._standing)
        return Verdict(self._text(failure), pause_s, self._refusal(failure))

    def next(self) -> None:
        """The next attempt begins."""
        self.attempt += 1

    def _text(self, failure: Failure) -> str:
        text = f"{self.name} ended: {failure.text}"
        if self._standing > 1:
            text += f"; {self._standing} in a row without progress"
        if self._budget is not None:
            left = max(self._budget - self.attempt, 0)
            text += f"; {left} attempt{' is' if left == 1 else 's are'} left"
        return text

    def _refusal(self, failure: Failure) -> str | None:
        blind = failure.place[0] is None
        borne = (_BORNE_BLINDLY if blind else _BORNE).get(failure.kind)
        if borne is None or self._repeats <= borne:
            return None
        where = "without any progress" if blind else f"at step {failure.place[0]}"
        why = (
            "no slice was reported lost"
            if failure.kind == "unexplained"
            else "the slice ended by itself each time"
        )
        return (
            f"the same error came {self._repeats} times in a row {where}, and {why}: "
            "it is the program's own, and another attempt would meet it again"
        )


def budget_of(policy: Callable[[int, Exception], bool] | None) -> int | None:
    """How many attempts a retry policy allows, if it says so (as `ElasticRetryLimit` does)."""
    budget = getattr(policy, "max_attempts", None)
    return budget if isinstance(budget, int) else None
