"""Programs across hosts: who is in the present epoch, and the inquest when one fails.

When a slice dies, its peers' own errors ("Connection reset by peer") often arrive before the news of
its death. Told as they are they would mislead, so an error of a program across hosts waits for an
inquest: the hosts of its epoch are asked for a sign of life. Either one of them is declared lost
meanwhile, and the error is that loss; or all answer, and the error is told as what it is: a broken
link between living slices costs just the programs in flight.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, final

from regrow.channel.commands import (
    Adopt,
    EpochBroken,
    FailEpoch,
    FormEpoch,
    Ping,
)
from regrow.errors import Code, SliceLostError, StatusError
from regrow.head.coordination import Coordination
from regrow.head.links import Link
from regrow.head.topology import Topology
from regrow.slices import Epoch

log = logging.getLogger(__name__)

# How XLA begins what its collectives raise, maybe behind other words of its own. A user's error may
# well speak of connections, but it says something else or is known to be the user's.
_TRANSPORT = re.compile(
    r"(?:\A|: )Gloo (?:AllGather|ReduceScatter|all-reduce|all-to-all|collective permute|"
    r"context initialization) (?:failed|timed out): "
)
_VERDICTS_KEPT = 256
# Programs of an epoch that was left for a larger one may still be in flight.
_EPOCHS_KEPT = 64


@final
class Failure(NamedTuple):
    """What a host tells of a failed epoch.

    Attributes:
        error: The error, not judged yet.
        launch: The program that failed, 0 if it is not known which.
        own: Whether it is the program's own error for certain, True or False; None: by its text.
    """

    error: StatusError
    launch: int = 0
    own: bool | None = None

    @property
    def of_program(self) -> bool:
        """Whether the program failed by itself, and not the links."""
        return not _of_links(self.error) if self.own is None else self.own


def _of_links(error: StatusError) -> bool:
    return _TRANSPORT.search(error.message) is not None


@final
class Verdict(NamedTuple):
    """Why an epoch ended.

    Attributes:
        error: What its programs failed with.
        own: The error of the one that failed by itself, if one did.
    """

    error: StatusError
    own: StatusError | None = None

    def told(self, error: StatusError) -> StatusError:
        """What an error of a program of the epoch really is."""
        if self.own is None:
            return self.error
        if error.code is Code.DATA_LOSS:
            return error if error.message.startswith("slice ") else self.error
        # Links were cut under the one program that was in flight.
        return self.own if _of_links(error) else error


@final
class Inquest:
    """One failed epoch, before its verdict."""

    def __init__(self, epoch: Epoch, failure: Failure, ping: int) -> None:
        self.epoch = epoch
        self.failure = failure
        self.ping = ping
        self.opened_at = time.monotonic()
        self.unheard: set[int] = set()
        self.waiting: list[Callable[[Verdict], None]] = []


@final
class Epochs:
    """The present epoch, and the verdicts about former ones."""

    def __init__(
        self, topology: Topology, links: dict[int, Link], coordination: Coordination
    ) -> None:
        self._topology = topology
        self._links = links
        self._coordination = coordination
        self._current: Epoch | None = None
        self._alive: dict[int, Epoch] = {}
        self._last = 0
        self._ports: dict[int, dict[int, int]] = {}
        self._inquests: dict[int, Inquest] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._pings = 0

    # --- forming ---

    def covering(self, hosts: Iterable[int]) -> int:
        """The number of an epoch that has all these hosts, which must be up; formed if need be."""
        current = self._current
        if current is None or not set(hosts) <= set(current.hosts):
            current = self._form()
        return current.number

    def is_larger_than(self, hosts: Iterable[int]) -> bool:
        """Whether the present epoch has these hosts, and more."""
        return self._current is not None and set(hosts) < set(self._current.hosts)

    def form_if_needed(self) -> None:
        """Forms an epoch of all hosts that are up, ahead of its first program."""
        if self._current is None and len(self._links) > 1:
            self._form()

    def _form(self) -> Epoch:
        hosts = sorted(self._links)
        self._last += 1
        epoch = Epoch(self._last, tuple((host, self._links[host].incarnation) for host in hosts))
        self._current = self._alive[epoch.number] = epoch
        for number in list(self._alive)[:-_EPOCHS_KEPT]:
            if number not in self._inquests:
                del self._alive[number], self._ports[number]
                self._coordination.close(number)
        self._ports[epoch.number] = {}
        members = [self._topology.devices_of_host(host) for host in hosts]
        keys = self._coordination.open(epoch.number, len(hosts))
        address = self._coordination.address
        for node, (host, key) in enumerate(zip(hosts, keys, strict=True)):
            self._links[host].send(FormEpoch(epoch.number, node, members, address, key))
        log.info("epoch %d: hosts %s", epoch.number, hosts)
        return epoch

    def formed(self, epoch: int, host: int, port: int) -> None:
        """A host has joined."""
        ports = self._ports.get(epoch)
        if ports is not None:
            ports[host] = port

    # --- membership ---

    def suspected_since(self, host: int) -> float | None:
        """When programs of an epoch with this host began to fail for a reason not yet known."""
        return min(
            (one.opened_at for one in self._inquests.values() if host in one.epoch.hosts),
            default=None,
        )

    def host_lost(self, host: int, incarnation: int, error: SliceLostError) -> None:
        """A host is lost, and with it the epochs that it was in."""
        for epoch in list(self._alive.values()):
            if epoch.has(host, incarnation):
                self._end(epoch, Verdict(error))

    def host_left(self, host: int, incarnation: int) -> None:
        """A host has left in good order, when nothing was under way."""
        for epoch in list(self._alive.values()):
            if epoch.has(host, incarnation):
                text = f"epoch {epoch.number} ended, for a slice of it was suspended"
                self._end(epoch, Verdict(StatusError(Code.UNAVAILABLE, text)))

    # --- failing ---

    def broken(self, report: EpochBroken) -> None:
        """A program failed on some host, or the epoch could not be formed; starts the inquest."""
        number, launch = report.epoch, report.launch
        if report.cause:
            self.judge(
                report.cause, _error_of(report), lambda told: self._lost(number, launch, told)
            )
        elif not launch:
            self._links_broke(number, report.message)
        else:
            own = True if report.code else None
            self._judge(number, Failure(_error_of(report), launch, own), None)

    def _lost(self, number: int, launch: int, error: StatusError) -> None:
        """A program could not run, for an argument of it was lost before."""
        self._judge(number, Failure(error, launch, own=True), None)

    def _links_broke(self, number: int, text: str) -> None:
        self._judge(number, Failure(StatusError(Code.UNAVAILABLE, text), own=False), None)

    def judge(self, number: int, error: StatusError, then: Callable[[StatusError], None]) -> None:
        """Calls `then` with what an error of a program of this epoch really is; maybe later."""
        if not self._judge(number, Failure(error), lambda verdict: then(verdict.told(error))):
            then(_forgotten(number, error))

    def _judge(self, number: int, failure: Failure, then: Callable[[Verdict], None] | None) -> bool:
        """Has `then` called with the verdict; False if there will be none."""
        if number in self._verdicts:
            if then is not None:
                then(self._verdicts[number])
            return True
        inquest = self._inquests.get(number)
        if inquest is None:
            epoch = self._alive.get(number)
            if epoch is None:
                return False
            inquest = self._open_inquest(epoch, failure)
        elif inquest.failure.of_program and not inquest.failure.launch and failure.launch:
            inquest.failure = failure
        if then is not None:
            inquest.waiting.append(then)
        if not inquest.unheard:
            self._conclude(inquest)
        return True

    def _open_inquest(self, epoch: Epoch, failure: Failure) -> Inquest:
        log.info("inquest on epoch %d: %s", epoch.number, failure)
        self._pings += 1
        inquest = self._inquests[epoch.number] = Inquest(epoch, failure, self._pings)
        for host in epoch.hosts:
            link = self._links.get(host)
            if link is not None:
                inquest.unheard.add(host)
                link.send(Ping(-self._pings))
        return inquest

    def alive(self, host: int, number: int) -> None:
        """A host answered a ping of an inquest, so it lived after all that was asked before."""
        for inquest in list(self._inquests.values()):
            if -number >= inquest.ping:
                inquest.unheard.discard(host)
                if not inquest.unheard:
                    self._conclude(inquest)

    def _conclude(self, inquest: Inquest) -> None:
        epoch, failure = inquest.epoch, inquest.failure
        own = failure.of_program
        what = "gave up" if own else "lost"
        slices = sorted({self._topology.slice_of_host(host) for host in epoch.hosts})
        error = StatusError(
            Code.DATA_LOSS,
            f"slice {slices[0]} {what} its collective links {_to(slices[1:])} in epoch "
            f"{epoch.number}; all of them live. The outputs and donated inputs of the programs in "
            f"flight are lost, other arrays are not. Cause: {failure.error.message[:300]}",
        )
        self._end(epoch, Verdict(error, failure.error if own else None), failure.launch)

    def _end(self, epoch: Epoch, verdict: Verdict, launch: int = 0) -> None:
        number = epoch.number
        self._alive.pop(number, None)
        self._verdicts[number] = verdict
        while len(self._verdicts) > _VERDICTS_KEPT:
            self._verdicts.pop(next(iter(self._verdicts)))
        self._fail(epoch, verdict, launch)
        self._coordination.close(number)
        if self._current is epoch:
            self._current = None
        inquest = self._inquests.pop(number, None)
        for then in inquest.waiting if inquest is not None else ():
            then(verdict)

    def _fail(self, epoch: Epoch, verdict: Verdict, launch: int) -> None:
        ports = list(self._ports.pop(epoch.number, {}).values())
        command = FailEpoch(epoch.number, verdict.error.message, ports)
        if verdict.own is not None:
            code, text = int(verdict.own.code), verdict.own.message
            command = command._replace(launch=launch, code=code, own=text)
        for host in epoch.hosts:
            link = self._links.get(host)
            if link is not None and epoch.has(host, link.incarnation):
                link.send(command)
                link.send(Adopt())


def _error_of(report: EpochBroken) -> StatusError:
    return StatusError(Code(report.code or Code.UNKNOWN), report.message)


def _forgotten(number: int, error: StatusError) -> StatusError:
    """What an error of an epoch is that nobody remembers: its hosts live, or it would have ended."""
    if not _of_links(error):
        return error
    text = f"the collective links of epoch {number} broke, long after it was left"
    return StatusError(Code.DATA_LOSS, text)


def _to(others: list[int]) -> str:
    if not others:
        return "between its hosts"
    return f"to slice{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
