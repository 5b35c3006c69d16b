"""One line to whoever runs the script."""

from __future__ import annotations

import sys
from typing import Final

_ended_here: Final[set[str]] = set()


def ends_here(target: str) -> None:
    """This process itself ends the cluster at a target: that is no news to it."""
    _ended_here.add(target)


def is_news(target: str) -> bool:
    """Whether the end of the cluster at a target is to be told."""
    return target not in _ended_here


def say(text: str) -> None:
    """Writes `regrow: text` to the standard error, where there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"regrow: {text}\n")
        sys.stderr.flush()
