"""Schedules that are drawn by lot, the same for the same seed. No I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from regrow.chaos.schedule import FaultEvent, in_order
from regrow.errors import UsageError

LOSING: Final = ("kill", "term", "segv", "exit", "oom", "stop", "cutlink")
"""The faults by which a slice is lost."""

DRAWN: Final = (*LOSING, "lostreply", "slowlink", "diskfull", "clockjump")
"""The faults that can be drawn. What ends one (`mend`) is added where it is needed."""

SETTLE_S: Final = 10.0
_MENDED: Final = ("slowlink", "diskfull")
_MEND_S: Final = (1.0, 5.0)
MAX_FAULTS: Final = 10_000


def draw_schedule(
    seed: int,
    slices: int,
    *,
    faults: Sequence[str] = DRAWN,
    rate_per_min: float = 6.0,
    duration_s: float = 60.0,
) -> tuple[FaultEvent, ...]:
    """Draws faults for a time, counted from the moment the client connects.

    They come as a Poisson process does, with equal chances for each fault, and for each slice that was
    not lost within the last `SETTLE_S`. A fault by which the last of those would be lost is left out,
    where there is more than one slice.

    Args:
        seed: The same seed, with the same other arguments, draws the same schedule.
        slices: How many slices there are.
        faults: Which faults.
        rate_per_min: How many faults a minute there are on average.
        duration_s: For how long.

    Raises:
        UsageError: An argument is out of range.
    """
    _check(slices, faults, rate_per_min, duration_s)
    generator = random.Random(f"regrow {seed}")  # noqa: S311 - chance, no secret
    lost_at = [-SETTLE_S] * slices
    events = []
    at_s = generator.expovariate(rate_per_min / 60)
    while at_s < duration_s:
        settled = [index for index, lost_s in enumerate(lost_at) if at_s - lost_s >= SETTLE_S]
        fault = generator.choice(faults)
        if settled and not (fault in LOSING and len(settled) == 1 < slices):
            index = generator.choice(settled)
            events.append(FaultEvent(fault, index, round(at_s, 3)))
            if fault in LOSING:
                lost_at[index] = at_s
            if fault in _MENDED:
                mend_s = at_s + generator.uniform(*_MEND_S)
                events.append(FaultEvent("mend", index, round(mend_s, 3)))
        at_s += generator.expovariate(rate_per_min / 60)
    return in_order(events)


def _check(slices: int, faults: Sequence[str], rate_per_min: float, duration_s: float) -> None:
    if slices < 1:
        raise UsageError(f"slices is {slices}; there must be at least 1")
    for fault in faults:
        if fault not in DRAWN:
            raise UsageError(f"{fault!r} is no fault to draw; allowed: {', '.join(DRAWN)}")
    if not faults:
        raise UsageError(f"there are no faults to draw; allowed: {', '.join(DRAWN)}")
    if not (rate_per_min > 0 and duration_s > 0):
        raise UsageError(
            f"a rate of {rate_per_min:g} faults a minute for {duration_s:g} s: both must be more "
            "than 0"
        )
    if rate_per_min * duration_s / 60 > MAX_FAULTS:
        raise UsageError(
            f"{rate_per_min:g} faults a minute for {duration_s:g} s are more than {MAX_FAULTS}"
        )
