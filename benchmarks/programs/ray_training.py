"""`examples/ray/resumed_training.py`, which writes down when it tells what: for `benchmarks/ray_recovery.py`.

ray_training.py EVENTS [the flags of resumed_training.py]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from regrow.ray import current_attempt

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def note(what: str) -> None:
    attempt = current_attempt()
    event = {"at": time.time(), "attempt": attempt.number, "rank": attempt.rank, "what": what}
    with Path(sys.argv[1]).open("a") as file:
        file.write(json.dumps(event) + "\n")


note("begins")
sys.path[:0] = [str(EXAMPLES / "ray"), str(EXAMPLES)]

import resumed_training  # noqa: E402

resumed_training.tell = note
resumed_training.main(sys.argv[2:])
