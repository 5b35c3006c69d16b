"""One line to whoever runs the script."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Writes `regrow: text` to the standard error, where there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"regrow: {text}\n")
        sys.stderr.flush()
