"""Faults on purpose: schedules of them, and what makes them."""

from regrow.chaos.draw import draw_schedule
from regrow.chaos.live import Chaos
from regrow.chaos.schedule import (
    FAULTS,
    PHASES,
    Anchor,
    AtStep,
    FaultEvent,
    InPhase,
    InRecovery,
    format_schedule,
    parse_schedule,
)

__all__ = [
    "FAULTS",
    "PHASES",
    "Anchor",
    "AtStep",
    "Chaos",
    "FaultEvent",
    "InPhase",
    "InRecovery",
    "draw_schedule",
    "format_schedule",
    "parse_schedule",
]
