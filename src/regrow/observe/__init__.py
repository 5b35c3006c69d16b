"""What became of the time: elastic events by their parts, goodput, and waits that last. No I/O."""

from regrow.observe.budget import Budget, parse_budgets
from regrow.observe.goodput import BUCKETS, Ledger
from regrow.observe.run import Run
from regrow.observe.steps import Program
from regrow.observe.text import event_lines, goodput_lines
from regrow.observe.timeline import PARTS, Activity, ElasticEvent, Kind, LostSteps, Report
from regrow.observe.waits import LongWait, LongWaits

__all__ = [
    "BUCKETS",
    "PARTS",
    "Activity",
    "Budget",
    "ElasticEvent",
    "Kind",
    "Ledger",
    "LongWait",
    "LongWaits",
    "LostSteps",
    "Program",
    "Report",
    "Run",
    "event_lines",
    "goodput_lines",
    "parse_budgets",
]
