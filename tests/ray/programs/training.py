"""A rank that trains with checkpoints; the first attempt waits where a fault is to hit it.

training.py DIRECTORY WHERE    DIRECTORY/go: go on; WHERE: training, checkpointing, ending
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

STEPS = 40
EVERY = 5
HOLD_TRAINING, HOLD_CHECKPOINTING = 12, 15
PACE_S = 0.2
State = list[float]


def step_of(state: State, step: int, rank: int) -> State:
    """A step of training: any two orders or numbers of steps give other states."""
    return [(0.9 * one + (step * (index + 3) + rank) % 7) / 1.1 for index, one in enumerate(state)]


def trained(rank: int, steps: int = STEPS) -> State:
    """The final state of a rank that nothing disturbs."""
    state = [0.0] * 8
    for step in range(1, steps + 1):
        state = step_of(state, step, rank)
    return state


def main(scratch: Path, where: str) -> None:
    from regrow.ray import current_attempt

    attempt = current_attempt()
    here = Path(attempt.directory)
    kept = here / f"checkpoint-{attempt.rank}"
    step, state = json.loads(kept.read_text()) if kept.exists() else (0, [0.0] * 8)
    (scratch / f"pid-{attempt.rank}").write_text(str(os.getpid()))
    print(f"begins after step {step}")

    def hold() -> None:
        (scratch / f"holds-{attempt.rank}").touch()
        while attempt.number == 1 and not (scratch / "go").exists():
            time.sleep(0.01)

    def keep(path: Path, content: object) -> None:
        with attempt.writing():
            draft = path.with_name(f"{path.name}.draft")
            draft.write_text(json.dumps(content))
            if where == "checkpointing" and step == HOLD_CHECKPOINTING:
                hold()
            with (here / "writes").open("a") as writes:
                writes.write(f"{attempt.token} {attempt.rank} {step}\n")
            draft.replace(path)

    while step < STEPS:
        time.sleep(PACE_S)
        step += 1
        state = step_of(state, step, attempt.rank)
        if where == "training" and step == HOLD_TRAINING:
            hold()
        if step % EVERY == 0:
            keep(kept, (step, state))
    if where == "ending":
        hold()
    keep(here / f"final-{attempt.rank}", state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
