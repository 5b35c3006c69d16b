"""Makes the faults of a schedule, on the slices of a cluster of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, final

from regrow.chaos.relay import Mode, Relay
from regrow.chaos.schedule import AtStep, FaultEvent, InPhase
from regrow.chaos.triggers import Triggers
from regrow.config import HeadConfig
from regrow.control import ControlConnection, error_from_json, request
from regrow.errors import ControlError, RegrowError
from regrow.processes import ancestor

_STATUS_DEADLINE_S: Final = 2.0
_BEYOND_DEADLINE_S: Final = 1.0
_LINK_MODES: Final[dict[str, Mode]] = {"slowlink": "slow", "cutlink": "cut", "lostreply": "lose"}
_RAYLET: Final = "raylet"
_BY_CONTROL: Final = frozenset({"kill", "stop", "cont", "restore"})
_WITH_STATE: Final = frozenset({"suspend", "resume"})


@final
class Injector:
    """Waits for the moments of a schedule, and makes its faults then.

    It has no thread: whoever owns it waits until `fileno` is readable or `next_at` has come, and calls
    `step`.

    Attributes:
        done: The faults that were made, in their order.
        refused: Those that were not, with the reason (a slice that was lost already, say).
    """

    def __init__(
        self,
        config: HeadConfig,
        head_pid: int,
        events: Iterable[FaultEvent],
        tell: Callable[[str], None],
    ) -> None:
        """Connects to the head; `tell` gets a line for each fault.

        Raises:
            NoClusterError: The head is gone.
        """
        self.done: list[FaultEvent] = []
        self.refused: list[tuple[FaultEvent, str]] = []
        self._config = config
        self._head_pid = head_pid
        self._tell = tell
        self._triggers = Triggers(events)
        self._relay: Relay | None = None
        self._asked: dict[int, FaultEvent] = {}
        self._awaited: dict[int, FaultEvent] = {}
        self._frozen: list[tuple[subprocess.Popen[bytes], tuple[int, ...]]] = []
        self._control = ControlConnection(config.control_socket)
        self._control.subscribe()
        self._await()
        if request(config.control_socket, "status", timeout_s=_STATUS_DEADLINE_S)["clients"]:
            self._triggers.connected(time.monotonic())

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """What becomes readable when there is something for `step` to do."""
        return self._control.fileno()

    @property
    def left(self) -> tuple[FaultEvent, ...]:
        """The faults whose moment has not come."""
        return self._triggers.left

    @property
    def next_at(self) -> float | None:
        """When the next fault is due, by the monotonic clock, as far as that is known."""
        return self._triggers.next_at

    def step(self) -> None:
        """Takes what the head tells, and makes the faults that are due.

        Raises:
            ControlError: The head is gone.
        """
        events, answers = self._control.take()
        now = time.monotonic()
        for event in events:
            if event["kind"] == "client_connected":
                self._triggers.connected(now)
            elif event["kind"] == "slice_lost":
                self._triggers.lost(now)
        for answer in answers:
            self._answered(answer, now)
        for fault in self._triggers.due(time.monotonic()):
            self._order(fault)

    def close(self) -> None:
        """Ends what lasts: links are as before, and who is frozen wakes."""
        for process, pids in self._frozen:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                _send(pids, signal.SIGCONT)
            process.wait()
        self._frozen.clear()
        if self._relay is not None:
            self._relay.close()
        self._control.close()

    # --- when ---

    def _await(self) -> None:
        """Has the head tell of the steps and phases of the schedule."""
        for event in self._triggers.awaited:
            match event.anchor:
                case AtStep(step):
                    number = self._control.send("wait_step", step=step)
                case InPhase(phase):
                    number = self._control.send("wait_phase", phase=phase, index=event.slice_index)
                case _:
                    continue
            self._awaited[number] = event

    def _answered(self, answer: dict[str, Any], now: float) -> None:
        number = answer.get("id", 0)
        why = str(error_from_json(answer["error"])) if "error" in answer else None
        awaited, asked = self._awaited.pop(number, None), self._asked.pop(number, None)
        if awaited is not None and why is None:
            match awaited.anchor:
                case AtStep(step):
                    self._triggers.step(step, now)
                case InPhase(phase):
                    self._triggers.phase(phase, awaited.slice_index, now)
        elif asked is not None and why is not None:
            self.done.remove(asked)
            self._refuse(asked, why)

    # --- what ---

    def _order(self, event: FaultEvent) -> None:
        at = "" if event.anchor is None else f" at {event.when}"
        self._tell(f"chaos: {event.fault} slice {event.slice_index}{at}")
        self.done.append(event)
        try:
            self._make(event)
        except (RegrowError, OSError) as error:
            self.done.remove(event)
            self._refuse(event, str(error))

    def _refuse(self, event: FaultEvent, why: str) -> None:
        self.refused.append((event, why))
        self._tell(f"chaos: {event.fault} of slice {event.slice_index} was refused: {why}")

    def _make(self, event: FaultEvent) -> None:
        index, fault = event.slice_index, event.fault
        if fault in _BY_CONTROL:
            method: Any = fault
            self._asked[self._control.send(method, index=index)] = event
        elif fault in _WITH_STATE:
            method = fault
            self._asked[self._control.send(method, slices=[index], why="chaos")] = event
        elif fault == "clockjump":
            self._freeze((self._head_pid, *self._pids(index)))
        elif fault == "killnode":
            self._kill_nodes(index)
        elif fault in _LINK_MODES:
            self._set_link(self._pids(index), _LINK_MODES[fault])
            self._ask("sever", event)
        else:
            if fault == "mend" and self._relay is not None:
                self._relay.set_mode(self._pids(index), None)
            self._ask(fault, event)

    def _ask(self, fault: str, event: FaultEvent) -> None:
        number = self._control.send("fault", index=event.slice_index, fault=fault)
        self._asked[number] = event

    def _pids(self, index: int) -> tuple[int, ...]:
        status = request(self._config.control_socket, "status", timeout_s=_STATUS_DEADLINE_S)
        hosts = status["slices"][index]["hosts"]
        pids = tuple(host["pid"] for host in hosts if host["pid"] is not None)
        if not pids:
            raise ControlError(f"slice {index} has no processes")
        return pids

    def _kill_nodes(self, index: int) -> None:
        raylets = {
            found for pid in self._pids(index) for found in [ancestor(pid, _RAYLET)] if found
        }
        if not raylets:
            raise ControlError(f"slice {index} runs on no node of a Ray cluster")
        _send(raylets, signal.SIGKILL)

    def _set_link(self, pids: Iterable[int], mode: Mode) -> None:
        if self._relay is None:
            self._relay = Relay(self._config.worker_socket)
            self._relay.start()
        self._relay.set_mode(pids, mode)

    def _freeze(self, pids: tuple[int, ...]) -> None:
        """Freezes processes for longer than a host may be silent.

        Another process wakes them: it does so also when this one is killed meanwhile.
        """
        length_s = self._config.hang_after_s + _BEYOND_DEADLINE_S
        names = " ".join(map(str, pids))
        script = f"kill -STOP {names}; sleep {length_s:.3f}; kill -CONT {names}"
        process = subprocess.Popen(
            ["sh", "-c", script], stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._frozen.append((process, pids))


def _send(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
