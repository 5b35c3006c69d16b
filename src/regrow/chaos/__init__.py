"""Faults on purpose: schedules of them."""

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
    "FaultEvent",
    "InPhase",
    "InRecovery",
    "format_schedule",
    "parse_schedule",
]
