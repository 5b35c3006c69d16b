"""Where the members of an epoch meet: the state of XLA's coordination services, without I/O.

PJRT clients need a coordination service to join, and an agent (XLA's name for the client's end) ends
its process when a poll, a heartbeat or its leave fails. So nothing in here ever fails those: an agent
of an epoch that is over finds everything in good order, and can merely read and write no values.

Every member registers by a key of its own, and learns the secret of its epoch; all its other calls
carry that secret. So an agent of one epoch cannot disturb another.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, TypeAlias, final

from regrow.errors import Code, StatusError

NOWHERE: Final = 0
"""The secret of no epoch."""

_KEYS: Final = 1 << 31  # An agent's number is an int32.
_SECRETS: Final = 1 << 63
_INT64: Final = 1 << 63
_VALUES_BYTES: Final = 64 << 20
_VALUE_OVERHEAD_BYTES: Final = 200
_WAITS: Final = 10_000

Answer: TypeAlias = Callable[[StatusError | None, Any], None]


@final
class Wait:
    """A call that is answered later, once; or never, when its caller has gone."""

    __slots__ = ("_answer", "_forget")

    def __init__(self, answer: Answer, forget: Callable[[Wait], None]) -> None:
        self._answer: Answer | None = answer
        self._forget = forget

    def settle(self, error: StatusError | None, value: Any = None) -> None:
        """Answers, unless that was done or the caller has gone."""
        answer = self._answer
        self.drop()
        if answer is not None:
            answer(error, value)

    def drop(self) -> None:
        """Forgets the call."""
        if self._answer is not None:
            self._answer = None
            self._forget(self)


@final
class _Gathering:
    """Members that wait for each other."""

    def __init__(self, nodes: frozenset[int], only_alive: bool) -> None:
        self.nodes = nodes
        self.only_alive = only_alive
        self.arrived: dict[int, Wait] = {}


@final
class Rendezvous:
    """The coordination service of one epoch. Its members are numbered from 0: their nodes."""

    def __init__(self, epoch: int, keys: Iterable[int], secret: int) -> None:
        """Opens it.

        Args:
            epoch: The epoch.
            keys: What each member registers by, in the order of the nodes.
            secret: What all other calls carry.
        """
        self.epoch = epoch
        self.secret = secret
        self.nodes = {key: node for node, key in enumerate(keys)}
        self._alive: dict[int, int] = {}  # incarnations by node
        self._left: set[int] = set()
        self._version = 0
        self._values: dict[str, bytes] = {}
        self._used_bytes = 0
        self._waits: dict[Wait, None] = {}
        self._reads: dict[str, dict[Wait, None]] = {}
        self._polls: dict[int, Wait] = {}
        self._watches: dict[Wait, None] = {}
        self._gatherings: dict[Hashable, _Gathering] = {}

    # --- members ---

    def node(self, key: int) -> int:
        """The node of the member with that key.

        Raises:
            StatusError: It is none.
        """
        node = self.nodes.get(key)
        if node is None:
            raise StatusError(Code.INVALID_ARGUMENT, f"no member of epoch {self.epoch}")
        return node

    def register(self, key: int, incarnation: int) -> None:
        """A member is there; the others are not waited for."""
        node = self.node(key)
        self._alive[node] = incarnation
        self._left.discard(node)
        self._changed()

    def leave(self, key: int) -> None:
        """A member leaves in good order; it may be none."""
        poll = self._polls.get(self.nodes.get(key, -1))
        if poll is not None:
            poll.settle(StatusError(Code.CANCELLED, "the member has left"))

    def poll(self, key: int, answer: Answer) -> Wait:
        """Waits for an error, which never comes: until the member leaves or the epoch ends.

        A member whose poll ends without a successor is there no more: it left, or was ended.
        """
        node = self.node(key)
        former = self._polls.get(node)

        def forget(wait: Wait) -> None:
            if self._polls.get(node) is wait:
                del self._polls[node]
                self._gone(node)

        self._polls[node] = wait = self._wait(answer, forget)
        if former is not None:
            former.settle(StatusError(Code.CANCELLED, "the member asked again"))
        return wait

    def _gone(self, node: int) -> None:
        if self._alive.pop(node, None) is None:
            return
        self._left.add(node)
        for name, gathering in list(self._gatherings.items()):
            if not gathering.only_alive and node in gathering.nodes:
                self._fail(gathering, _has_left(node))
            else:
                self._check(name)
        self._changed()

    def watch(self, version: int, answer: Answer) -> Wait:
        """Waits for members to be others than at that version, which is negative at first.

        The answer is the version, and the incarnation of each node, None for one that is not there.
        """
        wait = self._wait(answer, lambda wait: self._watches.pop(wait, None))
        self._watches[wait] = None
        if version != self._version:
            wait.settle(None, self._members())
        return wait

    def _members(self) -> tuple[int, list[int | None]]:
        return self._version, [self._alive.get(node) for node in self.nodes.values()]

    def _changed(self) -> None:
        self._version += 1
        for wait in list(self._watches):
            wait.settle(None, self._members())

    # --- values ---

    def insert(self, name: str, value: bytes, overwrite: bool) -> None:
        """Gives a name a value.

        Raises:
            StatusError: It has one, and `overwrite` is false; or all values are too large.
        """
        name = _normal(name)
        if not overwrite and name in self._values:
            raise StatusError(Code.ALREADY_EXISTS, f"the key {name} has a value")
        self._store(name, value)

    def read(self, name: str, answer: Answer) -> Wait:
        """The value of a name, as soon as it has one."""
        name = _normal(name)

        def forget(wait: Wait) -> None:
            del self._reads[name][wait]
            if not self._reads[name]:
                del self._reads[name]

        wait = self._wait(answer, forget)
        self._reads.setdefault(name, {})[wait] = None
        if name in self._values:
            wait.settle(None, self._values[name])
        return wait

    def read_now(self, name: str) -> bytes:
        """The value of a name.

        Raises:
            StatusError: It has none.
        """
        value = self._values.get(_normal(name))
        if value is None:
            raise StatusError(Code.NOT_FOUND, f"the key {name} has no value")
        return value

    def directory(self, name: str) -> list[tuple[str, bytes]]:
        """The names and values below a name."""
        above = f"{_normal(name)}/"
        return [(name, value) for name, value in self._values.items() if name.startswith(above)]

    def increment(self, name: str, step: int) -> bytes:
        """Adds to a value, which is a decimal number, 0 at first; the sum.

        Raises:
            StatusError: The value is no number, or the sum no int64.
        """
        name = _normal(name)
        try:
            total = int(self._values.get(name, b"0")) + step
        except ValueError:
            raise StatusError(
                Code.FAILED_PRECONDITION, f"the value of the key {name} is no number"
            ) from None
        if not -_INT64 <= total < _INT64:
            raise StatusError(Code.OUT_OF_RANGE, f"the value of the key {name} becomes too large")
        self._store(name, b"%d" % total)
        return self._values[name]

    def delete(self, name: str) -> None:
        """Takes away the values of a name and of all below it."""
        name = _normal(name)
        for gone in [name, *(below for below, _ in self.directory(name))]:
            value = self._values.pop(gone, None)
            if value is not None:
                self._used_bytes -= _size(gone, value)

    def _store(self, name: str, value: bytes) -> None:
        old = self._values.get(name)
        size = _size(name, value) - (0 if old is None else _size(name, old))
        if self._used_bytes + size > _VALUES_BYTES:
            raise StatusError(
                Code.RESOURCE_EXHAUSTED,
                f"the values of epoch {self.epoch} are larger than {_VALUES_BYTES} bytes",
            )
        self._used_bytes += size
        self._values[name] = value
        for wait in list(self._reads.get(name, ())):
            wait.settle(None, value)

    # --- waiting for each other ---

    def barrier(
        self, name: str, counter: int, nodes: Iterable[int], key: int, answer: Answer
    ) -> Wait:
        """Waits for these nodes, or all if there are none, to come to the same barrier."""
        wanted = frozenset(nodes) or frozenset(self.nodes.values())
        return self._gather(("barrier", name, counter), wanted, False, key, answer)

    def cancel_barrier(self, name: str, counter: int) -> None:
        """Ends the waits at a barrier."""
        gathering = self._gatherings.get(("barrier", name, counter))
        if gathering is not None:
            self._fail(gathering, StatusError(Code.CANCELLED, f"the barrier {name} was cancelled"))

    def alive(self, nodes: Iterable[int], key: int, answer: Answer) -> Wait:
        """Waits for those of these nodes that are there to ask the same; answers who they are."""
        wanted = frozenset(nodes)
        return self._gather(("alive", wanted), wanted, True, key, answer)

    def _gather(
        self, name: Hashable, nodes: frozenset[int], only_alive: bool, key: int, answer: Answer
    ) -> Wait:
        node = self.node(key)
        if node not in nodes or not nodes <= set(self.nodes.values()):
            raise StatusError(
                Code.INVALID_ARGUMENT, f"node {node} of epoch {self.epoch} waits for wrong nodes"
            )
        gathering = self._gatherings.get(name) or _Gathering(nodes, only_alive)
        if gathering.nodes != nodes:
            raise StatusError(Code.INVALID_ARGUMENT, "others wait there for other nodes")

        def forget(wait: Wait) -> None:
            if gathering.arrived.get(node) is wait:
                del gathering.arrived[node]
            if not gathering.arrived and self._gatherings.get(name) is gathering:
                del self._gatherings[name]

        wait = self._wait(answer, forget)
        former = gathering.arrived.get(node)
        gathering.arrived[node] = wait
        self._gatherings[name] = gathering
        if former is not None:
            former.settle(StatusError(Code.ABORTED, f"node {node} came again"))
        gone = nodes & self._left
        if gone and not only_alive:
            self._fail(gathering, _has_left(min(gone)))
        self._check(name)
        return wait

    def _check(self, name: Hashable) -> None:
        gathering = self._gatherings.get(name)
        if gathering is None:
            return
        nodes = gathering.nodes
        if gathering.only_alive:
            nodes = nodes & self._alive.keys()
        if nodes <= gathering.arrived.keys():
            there = [(node, self._alive.get(node, 0)) for node in sorted(nodes)]
            for wait in list(gathering.arrived.values()):
                wait.settle(None, there)

    def _fail(self, gathering: _Gathering, error: StatusError) -> None:
        for wait in list(gathering.arrived.values()):
            wait.settle(error)

    # --- waits ---

    def _wait(self, answer: Answer, forget: Callable[[Wait], Any]) -> Wait:
        if len(self._waits) >= _WAITS:
            raise StatusError(
                Code.RESOURCE_EXHAUSTED, f"more than {_WAITS} calls wait in epoch {self.epoch}"
            )

        def gone(wait: Wait) -> None:
            del self._waits[wait]
            forget(wait)

        wait = Wait(answer, gone)
        self._waits[wait] = None
        return wait

    def close(self) -> None:
        """Ends all waits. CANCELLED is the one end of a poll that leaves an agent alive."""
        self._alive.clear()  # Nobody has left.
        for wait in list(self._waits):
            wait.settle(closed(Code.CANCELLED))


@final
class Coordination:
    """The coordination services of all epochs.

    Attributes:
        address: Where agents find them, as gRPC writes addresses.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._by_epoch: dict[int, Rendezvous] = {}
        self._by_key: dict[int, Rendezvous] = {}
        self._by_secret: dict[int, Rendezvous] = {}

    def open(self, epoch: int, members: int) -> list[int]:
        """Opens the service of an epoch; the keys that its members register by, in their order."""
        keys: dict[int, None] = {}
        while len(keys) < members:
            key = secrets.randbelow(_KEYS)
            if key not in self._by_key:
                keys[key] = None
        secret = secrets.randbelow(_SECRETS - 1) + 1
        rendezvous = Rendezvous(epoch, keys, secret)
        self._by_epoch[epoch] = self._by_secret[secret] = rendezvous
        self._by_key |= dict.fromkeys(keys, rendezvous)
        return list(keys)

    def close(self, epoch: int) -> None:
        """Ends the service of an epoch, if there is one; members that are still there live on."""
        rendezvous = self._by_epoch.pop(epoch, None)
        if rendezvous is None:
            return
        del self._by_secret[rendezvous.secret]
        for key in rendezvous.nodes:
            del self._by_key[key]
        rendezvous.close()

    def register(self, key: int, incarnation: int) -> int:
        """An agent comes; the secret of its epoch, or `NOWHERE` if it is of none (any more).

        An agent that is refused ends its process; and it may come late to an epoch that is over.
        """
        rendezvous = self._by_key.get(key)
        if rendezvous is None:
            return NOWHERE
        rendezvous.register(key, incarnation)
        return rendezvous.secret

    def find(self, secret: int) -> Rendezvous | None:
        """The service with that secret, if it is open."""
        return self._by_secret.get(secret)


def _has_left(node: int) -> StatusError:
    return StatusError(Code.ABORTED, f"node {node} has left")


def closed(code: Code) -> StatusError:
    """The error of a call to a service that is not there any more."""
    return StatusError(code, "the coordination service of this epoch has closed")


def _normal(name: str) -> str:
    """A name without empty parts, as XLA takes it."""
    return "/".join(part for part in name.split("/") if part)


def _size(name: str, value: bytes) -> int:
    return len(name) + len(value) + _VALUE_OVERHEAD_BYTES
