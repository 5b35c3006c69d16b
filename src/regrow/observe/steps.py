"""Which program is the training's step, how often it has run, and which steps are lost with a slice."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias, final

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
    """

    name: str
    weight: int = 0
    small: bool = False
    count: int = 0


# Of an execution of the step: its number, the step that was told, the productive time before it.
# A plain tuple, for one is made in each step of a training.
Mark: TypeAlias = tuple[int, int | None, float]


@final
class Steps:
    """Counts executions of the dominant program, which is taken for the step of the training.

    Of the programs that ran more than once, it is the one with the largest product of executions and
    size of code.

    Attributes:
        main: That program; None as long as none is known.
        number: The number of its latest execution; executions that were lost are counted again.
        taken: How often it was executed.
        lost: How many of these were lost.
        told: The step that the client has told last.
    """

    def __init__(self) -> None:
        self.main: Program | None = None
        self.number = 0
        self.taken = 0
        self.lost = 0
        self.told: int | None = None
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

    def launched(self, program: Program, productive_s: float, told: int | None) -> bool:
        """An execution has begun, of the step that the client told; returns whether it is a step."""
        program.count += 1
        if program is not self.main and not self._becomes_main(program):
            return False
        self.number += 1
        self.taken += 1
        self._marks.append((self.number, told, productive_s))
        return True

    def _becomes_main(self, program: Program) -> bool:
        if program.small or program.count < 2:
            return False
        sure = program.count >= _SURE or 2 * program.weight >= self._heaviest
        score = program.count * program.weight
        if not sure or (self.main is not None and score <= self.main.count * self.main.weight):
            return False
        self.main = program
        self.taken = self.number = program.count - 1
        self._marks.clear()
        return True

    # --- snapshots and losses ---

    def saved(self, number: int) -> None:
        """A snapshot is complete of the state after the execution of that number."""
        self._saved = number

    def resume(
        self, resumed: int | None, loaded: bool, productive_s: float
    ) -> tuple[LostSteps | None, float]:
        """Training goes on after a loss: at a step that the client tells, or from a snapshot.

        Args:
            resumed: The step that the client has told.
            loaded: Whether a snapshot was loaded.
            productive_s: The productive time up to the loss.

        Returns:
            The steps that were lost, None if none, or if it is not known which; and the productive
            time that went into them.
        """
        if resumed is not None:
            seen = [told for _, told, _ in self._marks if told is not None]
            last = max(seen, default=resumed - 1)
            lost = LostSteps(resumed, last, False) if resumed <= last else None
            again = (n for n, told, _ in self._marks if told is not None and told >= resumed)
            number = min(again, default=self.number + 1) - 1
        elif loaded and self._saved is not None and self._saved < self.number:
            number = self._saved
            lost = LostSteps(number + 1, self.number, True)
        else:
            return None, 0.0
        return lost, self._go_back(number, productive_s)

    def _go_back(self, number: int, productive_s: float) -> float:
        """Forgets what came after an execution; returns the productive time since then."""
        since = productive_s
        while self._marks and self._marks[-1][0] > number:
            since = self._marks.pop()[2]
        self.lost += self.number - number
        self.number = number
        return productive_s - since
