"""What of a store is left over. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, final

from regrow.suspend.manifest import Manifest

KEPT: Final = 2
"""Snapshots of a job that are kept: the latest and the one before it."""

PART_SUFFIX: Final = ".part"


@final
@dataclass(frozen=True, slots=True)
class Leftovers:
    """What may be removed, manifests first: a chunk goes only when no manifest names it.

    Attributes:
        manifests: Numbers of snapshots.
        chunks: Names of chunks, and of halves that were never finished.
    """

    manifests: tuple[int, ...]
    chunks: tuple[str, ...]


def old(numbers: Iterable[int], kept: int = KEPT) -> tuple[int, ...]:
    """The snapshots that are not among the latest."""
    ordered = sorted(numbers)
    return tuple(ordered[: max(len(ordered) - kept, 0)])


def leftovers(
    kept: Collection[Manifest], numbers: Iterable[int], names: Iterable[str]
) -> Leftovers:
    """What is not needed by the snapshots to be kept.

    Call it only while nobody writes to the store: chunks whose manifest is not committed yet are
    left over by this rule.
    """
    needed = {chunk for manifest in kept for chunk in manifest.chunks()}
    stay = {manifest.number for manifest in kept}
    return Leftovers(
        tuple(number for number in sorted(numbers) if number not in stay),
        tuple(name for name in sorted(names) if name not in needed),
    )
