"""Faults on purpose: schedules of them."""

from regrow.chaos.schedule import FAULTS, FaultEvent, format_schedule, parse_schedule

__all__ = ["FAULTS", "FaultEvent", "format_schedule", "parse_schedule"]
