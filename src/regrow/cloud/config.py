"""What the local Cloud TPU has to give, and how fast: its zones, capacity, quotas and times."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast, final, get_args

from regrow.cloud.accelerators import GENERATIONS
from regrow.errors import UsageError

OperationMetadata = Literal["by-version", "own", "common"]
Chips = Mapping[str, int]

ZONES: Final = ("us-central2-b", "us-central1-a", "us-east5-b", "europe-west4-b")
MAX_SLICES: Final = 256
# Two requests of four slices of the usual small Multislice shape, v4-16 or v5litepod-16.
_CHIPS: Final = dict.fromkeys(GENERATIONS, 128)


@final
@dataclass(frozen=True, slots=True)
class ReservationConfig:
    """Chips that are kept for requests that name this reservation.

    Attributes:
        name: Its id.
        zone: Its zone.
        generation: Its TPU generation.
        chips: Its size.
        project: Whose it is; "*": everybody's.
    """

    name: str
    zone: str
    generation: str
    chips: int
    project: str = "*"


def _default_reservations() -> tuple[ReservationConfig, ...]:
    return tuple(
        ReservationConfig(f"reserved-{generation}", zone, generation, chips)
        for zone in ZONES
        for generation, chips in _CHIPS.items()
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig:
    """Everything that is configurable of the local Cloud TPU's world.

    Attributes:
        zones: Chips by generation in each zone, beside what is reserved.
        reservations: Reserved chips.
        on_demand_quota: Chips by generation that one project may hold in one zone.
        spot_quota: The same for spot and best effort.
        queued_resources_quota: How many queued resources one project may have in one zone.
        step_s: The least time from state to state.
        notice_s: From the notice of a preemption or a maintenance event to SIGTERM.
        stop_s: From SIGTERM to SIGKILL.
        start_deadline_s: Hosts that are not up after so long are replaced.
        max_start_failures: So many failures end a request that is being provisioned.
        orphan_s: Hosts whose server has died wait so long for a new one; then they end.
        preemptions_per_hour: Mean rate at which each spot request is preempted.
        seed: Of the times of those preemptions.
        operation_metadata: Type of an operation's metadata: that of the API version ("own"),
            google.cloud.common.OperationMetadata ("common"), or the former for v2 and the latter for
            v2alpha1 ("by-version").
    """

    zones: Mapping[str, Chips] = field(default_factory=lambda: dict.fromkeys(ZONES, _CHIPS))
    reservations: tuple[ReservationConfig, ...] = field(default_factory=_default_reservations)
    on_demand_quota: Chips = field(default_factory=lambda: _CHIPS)
    spot_quota: Chips = field(default_factory=lambda: _CHIPS)
    queued_resources_quota: int = 20
    step_s: float = 0.02
    notice_s: float = 5.0
    stop_s: float = 5.0
    start_deadline_s: float = 60.0
    max_start_failures: int = 3
    orphan_s: float = 30.0
    preemptions_per_hour: float = 0.0
    seed: int = 0
    operation_metadata: OperationMetadata = "by-version"

    def __post_init__(self) -> None:
        for zone, chips in self.zones.items():
            _check_chips(f"zones.{zone}", chips)
        _check_chips("on_demand_quota", self.on_demand_quota)
        _check_chips("spot_quota", self.spot_quota)
        for one in self.reservations:
            _check_chips(f"the reservation {one.name}", {one.generation: one.chips})
            if one.zone not in self.zones:
                raise UsageError(f"the reservation {one.name} is in no zone of these: {one.zone}")
        for name in ("queued_resources_quota", "max_start_failures", "seed"):
            _check_number(name, getattr(self, name), whole=True)
        for name in ("step_s", "notice_s", "stop_s", "start_deadline_s", "orphan_s"):
            _check_number(name, getattr(self, name))
        _check_number("preemptions_per_hour", self.preemptions_per_hour)
        if self.operation_metadata not in get_args(OperationMetadata):
            choices = ", ".join(get_args(OperationMetadata))
            raise UsageError(f"operation_metadata {self.operation_metadata!r} is none of {choices}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> CloudConfig:
        """Reads a table as it stands in a file; what is not given has its default.

        Raises:
            UsageError: If a key is unknown or a value wrong.
        """
        known = {one.name for one in dataclasses.fields(cls)}
        if unknown := sorted(set(table) - known):
            raise UsageError(
                f"unknown setting {unknown[0]!r}; there are: {', '.join(sorted(known))}"
            )
        values = dict(table)
        for name in ("zones", "on_demand_quota", "spot_quota"):
            if not isinstance(values.get(name, {}), dict):
                raise UsageError(f"{name} must be a table")
        try:
            if "reservations" in values:
                entries = cast("list[dict[str, Any]]", values["reservations"])
                values["reservations"] = tuple(ReservationConfig(**one) for one in entries)
            elif "zones" in values:
                values["reservations"] = ()
        except TypeError:
            raise UsageError(
                "each of [[reservations]] has: name, zone, generation, chips, and perhaps project"
            ) from None
        return cls(**values)

    @classmethod
    def load(cls, path: Path, **overrides: Any) -> CloudConfig:
        """Reads a TOML file.

        Raises:
            UsageError: If it cannot be read or is wrong.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {path}: {error}") from None
        return cls.from_table(table | overrides)


def _check_chips(where: str, chips: object) -> None:
    if not isinstance(chips, Mapping):
        raise UsageError(f"{where} must give chips for each generation, say v4 = 64")
    for generation, number in chips.items():
        if generation not in GENERATIONS:
            raise UsageError(f"{where}: {generation!r} is none of {', '.join(GENERATIONS)}")
        _check_number(f"{where}.{generation}", number, whole=True)


def _check_number(name: str, value: object, *, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not math.isfinite(cast(float, value)) or cast(float, value) < 0:
        kind = "a whole number" if whole else "a number"
        raise UsageError(f"{name} is {value!r}; it must be {kind}, 0 or more")
