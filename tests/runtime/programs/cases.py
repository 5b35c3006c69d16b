"""What the scripts here share: named cases, each told on a line `ok NAME` or `bad NAME`."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

Case: TypeAlias = Callable[[], Any]
_cases: list[Case] = []


def case(function: Case) -> Case:
    """Makes a function a case of the script."""
    _cases.append(function)
    return function


def run_cases() -> int:
    """Runs the cases that the command line names, or all; the exit status.

    What a case returns is told behind its name; a failed one leaves its traceback there, too.
    """
    failed = 0
    for function in _cases:
        if sys.argv[1:] and function.__name__ not in sys.argv[1:]:
            continue
        begin = time.monotonic()
        try:
            told = function()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed += 1
            print("bad", function.__name__, flush=True)
        else:
            seconds = f"({time.monotonic() - begin:.2f} s)"
            words = ["ok", function.__name__, seconds, *([] if told is None else [str(told)])]
            # At once: other threads log to the same stream.
            sys.stdout.write(" ".join(words) + "\n")
            sys.stdout.flush()
    return 1 if failed else 0
