"""Whether a job can be suspended without its code knowing of it. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

_SHARE_OF_GRACE: Final = 0.8
_FIXED_S: Final = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the decision is made of.

    Attributes:
        stateful: Names of colocated Python programs: what they hold on to nobody can save.
        unsaved: What else lives there that has no bytes to save, in words.
        nbytes: Size of the state.
        speed: Measured bytes a second at which it is written; None: not known.
        grace_s: When the processes will be ended; None: nobody is in a hurry.
    """

    stateful: Sequence[str]
    unsaved: Sequence[str]
    nbytes: int
    speed: float | None
    grace_s: float | None


def needed_s(nbytes: int, speed: float) -> float:
    """How long a suspension takes, in seconds."""
    return nbytes / max(speed, 1.0) + _FIXED_S


def objection(facts: Facts) -> str | None:
    """Why the job cannot be suspended transparently; None: it can."""
    if facts.stateful:
        return (
            f"the job uses colocated Python ({', '.join(sorted(set(facts.stateful))[:3])}), whose "
            "state cannot be saved"
        )
    if facts.unsaved:
        return f"the job holds {facts.unsaved[0]}, which cannot be saved"
    if facts.grace_s is None or facts.speed is None:
        return None
    needed = needed_s(facts.nbytes, facts.speed)
    if needed > facts.grace_s * _SHARE_OF_GRACE:
        return (
            f"{facts.nbytes / 1e6:.0f} MB at {facts.speed / 1e6:.0f} MB/s take {needed:.1f} s, which "
            f"do not fit well into {facts.grace_s:g} s of grace"
        )
    return None
