"""Which program is the training's step, how often it has run, and which steps are lost with a slice."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, final

from regrow.observe.timeline import LostSteps

_MARKS: Final = 8192
_SURE: Final = 20


@dataclass(slots=True, eq=False)
class Program:
    """What is known of a program; those of one name, for other devices say, are one.

    Attributes:
        name: Its name.
        weight: The size of its code, in bytes: the measure of how much it does.
        small: Whether it can only be a check, or one of the small things beside a training.
        count: How often it was executed.
        step: The first step that the client told of an execution of it.
        repeats: Whether it was executed in two steps that the client told.
    """

    name: str
    weight: int = 0
    small: bool = False
    count: int = 0
    step: int | None = None
    repeats: bool = False

    def carried(self, step: int | None) -> None:
        """It was executed in a step that the client told, or in none."""
        if self.step is None:
            self.step = step
        elif step is not None and step != self.step:
            self.repeats = True


# Of an execution of the step: its number, the step that it carries, the productive time before it,
# and whether the step is only what was to be expected. A plain tuple, for one is made in each step.
Mark: TypeAlias = tuple[int, int | None, float, bool]


@final
class Resumed(NamedTuple):
    """Where a training goes on after a loss.

    Attributes:
        number: Its execution that goes on; None: the one that comes next.
        step: The step of that; None: it is not known.
        loaded: Whether the state came from the latest snapshot.
    """

    number: int | None = None
    step: int | None = None
    loaded: bool = False


@final
class Steps:
    """Counts executions of the dominant program, which is taken for the step of the training.

    Of the programs that ran more than once, it is the one with the largest product of executions and
    size of code. A light one could be a helper of a step that has not run yet: it has to run often, or
    in two steps that the client told.

    Attributes:
        main: That program; None as long as none is known.
        number: The number of its latest execution; executions that were lost are counted again.
        taken: How often it was executed.
        lost: How many of these were lost.
        told: The step that the client has told last.
        saving: The execution whose state is being saved, or was last; None: none since a loss.
    """

    def __init__(self) -> None:
        self.main: Program | None = None
        self.number = 0
        self.taken = 0
        self.lost = 0
        self.told: int | None = None
        self.saving: int | None = None
        self._programs: dict[str, Program] = {}
        self._heaviest = 0
        self._marks: deque[Mark] = deque(maxlen=_MARKS)
        self._saved: int | None = None

    def program(self, name: str, weight: int, small: bool) -> Program:
        """The program of that name."""
        program = self._programs.get(name)
        if program is None:
            program = self._programs[name] = Program(name, weight, small)
        if weight > program.weight:
            program.weight, program.small = weight, small
        if weight > self._heaviest:
            self._heaviest = weight
        return program

    def launched(
        self, program: Program, productive_s: float, step: int | None, expected: bool = False
    ) -> bool:
        """An execution has begun that carries this step; returns whether it is one of the training's.

        `expected`: the step is the one after the last that was recorded. It is right unless the
        client has just gone back.
        """
        program.count += 1
        if program is not self.main and not self._becomes_main(program, step):
            return False
        self.number += 1
        self.taken += 1
        self._marks.append((self.number, step, productive_s, expected))
        return True

    def _becomes_main(self, program: Program, step: int | None) -> bool:
        if program.small:
            return False
        program.carried(step)
        if program.count < 2:
            return False
        heavy = 2 * program.weight >= self._heaviest
        sure = heavy or program.repeats or program.count >= _SURE
        score = program.count * program.weight
        if not sure or (self.main is not None and score <= self.main.count * self.main.weight):
            return False
        self.main = program
        self.taken = self.number = program.count - 1
        self._marks.clear()
        return True

    @property
    def latest(self) -> tuple[int, int | None]:
        """The number of the latest execution, and the step that the client told before it."""
        if not self._marks or self._marks[-1][3]:
            return self.number, None
        return self.number, self._marks[-1][1]

    @property
    def tells(self) -> bool:
        """Whether the client told the step of the latest execution before it, as far as is known."""
        return self.latest[1] is not None

    # --- snapshots and losses ---

    def client_gone(self) -> None:
        """What comes next is another client's, which may begin anywhere."""
        self._marks.clear()
        self._saved = self.saving = None

    def begin_save(self) -> None:
        """The state after the latest execution is being saved."""
        self.saving = self.number

    def slice_lost(self) -> None:
        """A snapshot that is being made comes to nothing."""
        self.saving = None

    def saved(self, number: int) -> None:
        """A snapshot is complete of the state after the execution of that number."""
        self._saved = number

    def resume(self, at: Resumed, productive_s: float) -> tuple[LostSteps | None, float]:
        """Training goes on after a loss: at a step that the client names, or from a snapshot.

        Args:
            at: Where. Executions from `at.number` on are those that go on.
            productive_s: The productive time up to the loss.

        Returns:
            The steps that were lost, None if none, or if it is not known which; and the productive
            time that went into them.
        """
        end = self.number + 1 if at.number is None else at.number
        if at.step is not None:
            first, lost = self._since_step(at.step, end)
        elif at.loaded and self._saved is not None and self._saved < end - 1:
            first, lost = self._since_saved(self._saved, end)
        else:
            return None, 0.0
        return lost, 0.0 if lost is None else self._forget(first, end, productive_s)

    def _since_step(self, step: int, end: int) -> tuple[int, LostSteps | None]:
        """The first execution of this step or a later one, and what was executed from there on."""
        again = [
            (number, told)
            for number, told, *_ in self._marks
            if number < end and told is not None and told >= step
        ]
        if not again:
            return end, None
        first = min(number for number, _ in again)
        return first, LostSteps(step, max(told for _, told in again), False)

    def _since_saved(self, saved: int, end: int) -> tuple[int, LostSteps]:
        """Likewise since a snapshot; by the steps of the executions if each carries one."""
        first = saved + 1
        steps = [step for number, step, *_ in self._marks if first <= number < end]
        named = [step for step in steps if step is not None]
        self._name_again(saved, end)
        if len(named) < end - first:
            return first, LostSteps(first, end - 1, True)
        return first, LostSteps(min(named), max(named), False)

    def _name_again(self, saved: int, end: int) -> None:
        """What goes on from a snapshot has the step after it, not the one that was to be expected."""
        before = next((step for number, step, *_ in self._marks if number == saved), None)
        step = None if before is None else before + 1
        stale = next((mark[1] for mark in self._marks if mark[0] == end and mark[3]), None)
        self._marks = deque(
            (
                (number, step, spent_s, expected)
                if number >= end and expected and named == stale
                else (number, named, spent_s, expected)
                for number, named, spent_s, expected in self._marks
            ),
            maxlen=_MARKS,
        )

    def _forget(self, first: int, end: int, productive_s: float) -> float:
        """Forgets executions and counts on from the first; returns the productive time since then."""
        count = end - first
        since = next((spent_s for number, _, spent_s, _ in self._marks if number >= first), None)
        lost_s = 0.0 if since is None else max(0.0, productive_s - since)
        # What goes on was begun before the lost time was known to be lost.
        self._marks = deque(
            (
                (number - count, step, spent_s - lost_s, expected)
                if number >= end
                else (number, step, spent_s, expected)
                for number, step, spent_s, expected in self._marks
                if not first <= number < end
            ),
            maxlen=_MARKS,
        )
        self.lost += count
        self.number -= count
        return lost_s
