"""Between the resource manager and the head of a job, while an attempt runs.

Leases go to the head, losses of slices to the manager. It owns neither connection, and waits for
nothing.
"""

from __future__ import annotations

import time
from typing import Any, Final, final

from regrow.control import ControlConnection, Event
from regrow.jobs.tenant import Tenant

_STOP_MARGIN: Final = 0.5
_LEAST_GRACE_S: Final = 0.5


@final
class LeaseLink:
    """What passes between the two.

    Attributes:
        control: The head.
        stop_by: When the attempt must have ended, by the monotonic clock; None: it goes on.
        stop_reason: Why.
        attempt: The attempt that the head's life stands for; one that is resumed is the next.
    """

    def __init__(self, tenant: Tenant, control: ControlConnection) -> None:
        self.control = control
        self.stop_by: float | None = None
        self.stop_reason = ""
        self.attempt = tenant.tenancy.attempt
        self._tenant = tenant
        self._up: set[int] = set()
        self._returning: dict[int, tuple[int, int]] = {}
        self._suspending: int | None = None
        self._stored: set[int] = set()

    @property
    def tenant(self) -> Tenant:
        """The manager's side."""
        return self._tenant

    @property
    def stopping(self) -> bool:
        """Whether the attempt is to end."""
        return self.stop_by is not None

    @property
    def ranks(self) -> dict[int, int]:
        """Which slice of the machines each slice of the job is."""
        leases = sorted(self._tenant.tenancy.leases.items())
        return {rank: index for rank, (index, _) in leases}

    @property
    def missing(self) -> list[int]:
        """The slices that are leased, and not up."""
        return [rank for rank in self.ranks if rank not in self._up]

    @property
    def up(self) -> bool:
        """Whether all slices that are leased are up, and there is one."""
        return bool(self.ranks) and not self.missing

    def begin(self) -> None:
        """Tells the head of all leases that there are."""
        for rank, (index, incarnation) in self._tenant.tenancy.leases.items():
            self.control.send("lease", rank=rank, index=index, incarnation=incarnation)

    def step(self) -> list[Event]:
        """Reads both sides; returns the head's events for whoever reports them.

        Raises:
            ControlError: The head is gone.
        """
        self.obey()
        events, answers = self.control.take()
        return self.heard(events, answers)

    def obey(self) -> None:
        """Does what the manager has said."""
        for instruction in self._tenant.step():
            self._obey(instruction)

    def heard(self, events: list[Event], answers: list[dict[str, Any]]) -> list[Event]:
        """Takes what the head has said; returns the events that are for others, too."""
        for event in events:
            self._heard(event)
        for answer in answers:
            self._suspend_answered(answer)
            place = self._returning.pop(answer.get("id") or 0, None)
            if place is not None and "error" not in answer and self._tenant.tenancy.lost(*place):
                index, incarnation = place
                self._tenant.tell(
                    "SliceReturned", name=self._tenant.name, index=index, incarnation=incarnation
                )
        return [event for event in events if event["kind"] != "lease_lost"]

    def _heard(self, event: Event) -> None:
        index, incarnation = event["slice"], event["incarnation"]
        match event["kind"]:
            case "slice_up" if index is not None:
                self._up.add(index)
            case "slice_lost" if index is not None:
                self._up.discard(index)
            case "slice_suspended" if index is not None:
                self._stored.add(index)
            case "slice_resumed" if index is not None:
                self._stored.discard(index)
            case "lease_lost" if index is not None and incarnation is not None:
                place = (index, incarnation)
                if place not in self._returning.values() and self._tenant.tenancy.lost(*place):
                    cause = event["text"]
                    self._tenant.tell(
                        "SliceFailed", index=index, incarnation=incarnation, cause=cause
                    )
            case _:
                pass

    def _obey(self, told: dict[str, Any]) -> None:
        match told["kind"]:
            case "Grant":
                self.control.send(
                    "lease",
                    rank=told["rank"],
                    index=told["index"],
                    incarnation=told["incarnation"],
                )
                if not self._tenant.tenancy.suspended:
                    self._resume([told["rank"]])
            case "Start" if self._tenant.tenancy.suspended:
                self._tenant.tenancy.suspended = False
                self.attempt = told["attempt"]
                self._resume(list(self.ranks))
            case "Withdraw":
                self._send("withdraw", told)
            case "AskBack":
                number = self._send("give_back", told)
                self._returning[number] = (told["index"], told["incarnation"])
            case "Stop":
                left_s = max(_LEAST_GRACE_S, _STOP_MARGIN * (told["due"] - time.time()))
                self.stop_by = time.monotonic() + left_s
                self.stop_reason = told["reason"]
            case "Suspend":
                self._suspend(told["reason"])
            case _:
                pass

    def _resume(self, ranks: list[int]) -> None:
        """Has slices whose state is stored come back in their new places."""
        stored = [rank for rank in ranks if rank in self._stored]
        if stored:
            self.control.send("resume", slices=stored)

    def _suspend(self, reason: str) -> None:
        """Has the head save the state of all slices, or gives them back where it has done so before."""
        if self.ranks and self._stored.issuperset(self.ranks):
            self._left()
        else:
            self._suspending = self.control.send("suspend", slices=None, why=reason)

    def _suspend_answered(self, answer: dict[str, Any]) -> None:
        """The head has saved the state of all slices, or cannot."""
        if answer.get("id") != self._suspending or self._suspending is None:
            return
        self._suspending = None
        tenant = self._tenant
        if "error" in answer:
            cause = str(answer["error"].get("message"))
            tenant.tell("SuspendRefused", name=tenant.name, attempt=self.attempt, cause=cause)
            return
        self._left()

    def _left(self) -> None:
        """Gives back the leases of slices whose state is stored."""
        for index, incarnation in self._tenant.tenancy.leases.values():
            self.control.send("withdraw", index=index, incarnation=incarnation, cause="suspended")
        self._tenant.suspended()

    def _send(self, method: str, told: dict[str, Any]) -> int:
        index, incarnation = told["index"], told["incarnation"]
        return self.control.send(method, index=index, incarnation=incarnation, cause=told["reason"])
