"""How long elastic events may take: `--budget recover=2s`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from regrow.errors import UsageError
from regrow.observe.timeline import PARTS

_ENTRY: Final = re.compile(
    r"(?P<what>[a-z -]+)=(?P<number>[0-9]{1,9}(\.[0-9]{1,9})?)(?P<unit>ms|s)"
)
_WHOLE: Final = {"recover": "loss", "scale-up": "scale-up"}
_FORM: Final = "NAME=TIME, with a time such as 2s or 600ms"


@final
@dataclass(frozen=True, slots=True)
class Budget:
    """How long something may take.

    Attributes:
        what: "recover" (a loss), "scale-up", or one of `PARTS` of either.
        limit_s: How long it may take.
    """

    what: str
    limit_s: float

    def __str__(self) -> str:
        return f"{self.what}={self.limit_s:g}s"

    def breach(self, event: Mapping[str, Any]) -> str | None:
        """How an event, as `Report.to_json` gives it, breaks the budget; None: it does not."""
        kind = _WHOLE.get(self.what)
        if kind is None:
            took_s = event["parts"][self.what]
        elif event["kind"] == kind:
            took_s = event["wall_s"]
        else:
            return None
        if took_s <= self.limit_s:
            return None
        over = "" if event["ended"] == "recovered" else ", and it did not recover"
        name = f"{event['kind']} {event['number']}"
        part = "" if kind else f"{self.what} of "
        return f"{part}{name} took {took_s:.2f} s{over}; the budget is {self}"


def parse_budgets(text: str) -> tuple[Budget, ...]:
    """Budgets from what `--budget` takes: `recover=2s`, or several with commas.

    Raises:
        UsageError: The text is none; says which entry, and what is allowed.
    """
    return tuple(_parse(entry.strip()) for entry in text.split(","))


def _parse(entry: str) -> Budget:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise UsageError(f"{entry[:40]!r} is no budget; write {_FORM}")
    names: Sequence[str] = (*_WHOLE, *PARTS)
    if match["what"] not in names:
        raise UsageError(f"there is no budget for {match['what']!r}; allowed: {', '.join(names)}")
    return Budget(match["what"], float(match["number"]) * (1e-3 if match["unit"] == "ms" else 1.0))
