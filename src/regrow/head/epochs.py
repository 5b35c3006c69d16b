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
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, final

from regrow.channel.commands import (
    Adopt,
    CloseService,
    EpochAddress,
    FailEpoch,
    FormEpoch,
    OpenService,
    Ping,
)
from regrow.errors import Code, SliceLostError, StatusError
from regrow.head.links import Link
from regrow.head.topology import Topology
from regrow.slices import Epoch

log = logging.getLogger(__name__)

# What gloo, XLA and our own workers write; a user's error may well speak of connections.
_TRANSPORT = re.compile(
    r"gloo/|Gloo |GetKeyValue|could not join epoch|coordination service|collective coordinator"
)
_VERDICTS_KEPT = 256
# Programs of an epoch that was left for a larger one may still be in flight.
_EPOCHS_KEPT = 8


class Coordinator(Protocol):
    """The process that holds coordination services."""

    @property
    def link(self) -> Link | None:
        """The way to it, None while there is none."""
        ...


@final
class Verdict(NamedTuple):
    """Why an epoch ended.

    Attributes:
        error: What its programs failed with.
        own: Whether one of them failed by itself: that one tells its own error.
    """

    error: StatusError
    own: bool

    def told(self, error: StatusError) -> StatusError:
        """What an error of a program of the epoch really is."""
        if self.own and (error.code is not Code.DATA_LOSS or error.message.startswith("slice ")):
            return error
        return self.error


@final
class Inquest:
    """One failed epoch, before its verdict."""

    def __init__(self, epoch: Epoch, text: str, ping: int) -> None:
        self.epoch = epoch
        self.text = text
        self.ping = ping
        self.unheard: set[int] = set()
        self.waiting: list[Callable[[Verdict], None]] = []


@final
class Epochs:
    """The present epoch, and the verdicts about former ones."""

    def __init__(self, topology: Topology, links: dict[int, Link], coordinator: Coordinator):
        self._topology = topology
        self._links = links
        self._coordinator = coordinator
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

    def form_if_needed(self) -> None:
        """Forms an epoch of all hosts that are up, ahead of its first program."""
        if self._current is None and len(self._links) > 1:
            self._form()

    def _form(self) -> Epoch:
        if self._current is not None:
            self._close(self._current)
        hosts = sorted(self._links)
        self._last += 1
        epoch = Epoch(self._last, tuple((host, self._links[host].incarnation) for host in hosts))
        self._current = self._alive[epoch.number] = epoch
        for number in list(self._alive)[:-_EPOCHS_KEPT]:
            if number not in self._inquests:
                del self._alive[number], self._ports[number]
        self._ports[epoch.number] = {}
        members = [self._topology.devices_of_host(host) for host in hosts]
        for node, host in enumerate(hosts):
            self._links[host].send(FormEpoch(epoch.number, node, members))
        self._open(epoch)
        log.info("epoch %d: hosts %s", epoch.number, hosts)
        return epoch

    def _open(self, epoch: Epoch) -> None:
        coordinator = self._coordinator.link

        def opened(error: StatusError | None, address: str) -> None:
            if error is not None:
                self.broken(epoch.number, f"no coordination service: {error.message}")
                return
            for host in epoch.hosts:
                link = self._links.get(host)
                if link is not None and epoch.has(host, link.incarnation):
                    link.send(EpochAddress(epoch.number, address))

        if coordinator is None:
            opened(StatusError(Code.UNAVAILABLE, "the coordinator is being restarted"), "")
            return
        coordinator.ask(lambda rid: OpenService(rid, epoch.number, len(epoch.hosts)), opened)

    def _close(self, epoch: Epoch) -> None:
        coordinator = self._coordinator.link
        if coordinator is not None:
            coordinator.send(CloseService(epoch.number))

    def formed(self, epoch: int, host: int, port: int) -> None:
        """A host has joined."""
        ports = self._ports.get(epoch)
        if ports is not None:
            ports[host] = port

    # --- membership ---

    def host_lost(self, host: int, incarnation: int, error: SliceLostError) -> None:
        """A host is lost, and with it the epochs that it was in."""
        for epoch in list(self._alive.values()):
            if epoch.has(host, incarnation):
                self._end(epoch, Verdict(error, own=False))

    def coordinator_lost(self) -> None:
        """The services are gone: no epoch can make new connections."""
        if self._current is not None:
            self.broken(self._current.number, "the collective coordinator ended")

    # --- failing ---

    def broken(self, number: int, text: str) -> None:
        """A program of this epoch failed on some host; starts the inquest."""
        self._judge(number, text, None)

    def judge(self, number: int, error: StatusError, then: Callable[[StatusError], None]) -> None:
        """Calls `then` with what an error of a program of this epoch really is; maybe later."""
        if not self._judge(number, error.message, lambda verdict: then(verdict.told(error))):
            then(error)

    def _judge(self, number: int, text: str, then: Callable[[Verdict], None] | None) -> bool:
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
            inquest = self._open_inquest(epoch, text)
        if then is not None:
            inquest.waiting.append(then)
        if not inquest.unheard:
            self._conclude(inquest)
        return True

    def _open_inquest(self, epoch: Epoch, text: str) -> Inquest:
        log.info("inquest on epoch %d: %s", epoch.number, text)
        self._pings += 1
        inquest = self._inquests[epoch.number] = Inquest(epoch, text, self._pings)
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
        epoch, text = inquest.epoch, inquest.text
        own = _TRANSPORT.search(text) is None
        what = "gave up" if own else "lost"
        slices = sorted({self._topology.slice_of_host(host) for host in epoch.hosts})
        error = StatusError(
            Code.DATA_LOSS,
            f"slice {slices[0]} {what} its collective links {_to(slices[1:])} in epoch "
            f"{epoch.number}; all of them live. The outputs and donated inputs of the programs in "
            f"flight are lost, other arrays are not. Cause: {text[:300]}",
        )
        self._end(epoch, Verdict(error, own))

    def _end(self, epoch: Epoch, verdict: Verdict) -> None:
        number, message = epoch.number, verdict.error.message
        self._alive.pop(number, None)
        self._verdicts[number] = verdict
        while len(self._verdicts) > _VERDICTS_KEPT:
            self._verdicts.pop(next(iter(self._verdicts)))
        ports = self._ports.pop(number, {})
        for host in epoch.hosts:
            link = self._links.get(host)
            if link is not None and epoch.has(host, link.incarnation):
                link.send(FailEpoch(number, message, list(ports.values())))
                link.send(Adopt())
        self._close(epoch)
        if self._current is epoch:
            self._current = None
        inquest = self._inquests.pop(number, None)
        for then in inquest.waiting if inquest is not None else ():
            then(verdict)


def _to(others: list[int]) -> str:
    if not others:
        return "between its hosts"
    return f"to slice{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
