"""The buffers of a host: parts by number, with their errors and those that are still to come."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from regrow.errors import Code, RegrowError, WaitTimeout
from regrow.wire.status import from_exception
from regrow.worker.callbacks import user_error
from regrow.worker.platform import Array, Domain, is_given_away, shards_of
from regrow.worker.strings import Strings

_PART_DEADLINE_S = 600.0
_EPOCH_ENDED = re.compile(r"regrow epoch (\d+) ended: (.*)", re.DOTALL)
_taking_apart = threading.Lock()


def epoch_ended(epoch: int, message: str) -> str:
    """The poison of an epoch's launches: known again in any error that derives from it."""
    return f"regrow epoch {epoch} ended: {message}"


@final
class PartError(RegrowError):
    """Why a part has no value.

    `epoch` is not 0 where a program of that epoch failed, maybe because of its links; it is 0 where the
    error is the user's own for certain.
    """

    def __init__(self, code: Code, message: str, epoch: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.epoch = epoch

    @classmethod
    def of(cls, error: BaseException, epoch: int = 0) -> PartError:
        """The error of a part, from whatever was raised."""
        if isinstance(error, PartError):
            return error.fresh()
        ended = _EPOCH_ENDED.search(str(error))
        if ended is not None:
            return cls(Code.DATA_LOSS, ended.group(2), int(ended.group(1)))
        own = user_error(error)
        if own is not None:
            return cls(own.code, own.message)
        status = from_exception(error)
        return cls(status.code, status.message, epoch)


def epoch_over(epoch: int) -> PartError:
    """The error of what was to run in an epoch that has ended; the head knows why it has."""
    return PartError(Code.DATA_LOSS, f"epoch {epoch} has ended", epoch)


@final
class Part:
    """The local shards of one buffer.

    Either `whole` (an array over all devices of the buffer) or `shards` (one array a device) is set,
    or both; or `error`; or the part is pending, which means that another thread will `resolve` it.

    Attributes:
        devices: Logical ids of the local shards, in order.
        domain: The domain that the arrays belong to.
        epoch: The epoch whose failure may show when the value is waited for, or 0.
        busy: Set while a launch on another thread still needs the arrays.
        readers: One for each thread that is still to take hold of a value; set when it has.
    """

    __slots__ = (
        "_event",
        "busy",
        "devices",
        "domain",
        "epoch",
        "error",
        "readers",
        "shards",
        "whole",
    )

    def __init__(
        self,
        domain: Domain,
        devices: Sequence[int],
        shards: list[Array] | None = None,
        whole: Array | None = None,
        epoch: int = 0,
    ) -> None:
        self.domain = domain
        self.devices = devices
        self.shards = shards
        self.whole = whole
        self.epoch = epoch
        self.error: PartError | None = None
        self.busy: threading.Event | None = None
        self.readers: list[threading.Event] = []
        self._event: threading.Event | None = None

    @classmethod
    def failed(cls, domain: Domain, error: PartError) -> Part:
        """A part that holds an error."""
        part = cls(domain, ())
        part.error = error.fresh()
        part.epoch = error.epoch
        return part

    @classmethod
    def expected(cls, domain: Domain, devices: Sequence[int]) -> Part:
        """A part that another thread will resolve."""
        part = cls(domain, devices)
        part._event = threading.Event()
        return part

    @property
    def pending(self) -> bool:
        """Whether there is neither an array nor an error yet."""
        return self._event is not None and not self._event.is_set()

    def resolve(self, other: Part) -> None:
        """Takes over what another part holds, and wakes those that wait."""
        if self._event is None or self._event.is_set():
            return
        self.shards, self.whole, self.error = other.shards, other.whole, other.error
        self.domain, self.epoch = other.domain, other.epoch
        if other.devices:
            self.devices = other.devices
        self._event.set()

    def read(self) -> threading.Event:
        """Marks the part as being read, until the event is set; the executor's thread."""
        reading = threading.Event()
        self.readers = [*self.being_read(), reading]
        return reading

    def being_read(self) -> list[threading.Event]:
        """What there is to wait for before the arrays may be given away."""
        return [reading for reading in self.readers if not reading.is_set()]

    def settle(self) -> Part:
        """Waits until the part is not pending; the arrays may still be computed.

        Raises:
            WaitTimeout: Nothing came.
        """
        event = self._event
        if event is not None and not event.wait(_PART_DEADLINE_S):
            raise WaitTimeout("data that another host was to send", _PART_DEADLINE_S)
        return self

    def singles(self) -> list[Array]:
        """The local shards as single-device arrays.

        Raises:
            PartError: The part holds an error.
        """
        self._check()
        shards = self.shards
        return self._taken_apart() if shards is None else shards

    def _taken_apart(self) -> list[Array]:
        # Who comes late must not put back what another thread has moved to another domain meanwhile.
        with _taking_apart:
            if self.shards is None:
                self._check()
                whole: Any = self.whole
                self.shards = list(whole) if isinstance(whole, list) else shards_of(whole)
            return self.shards

    def arrays(self) -> Sequence[Array]:
        """What there is to wait for: the whole, or the shards.

        Raises:
            PartError: The part holds an error.
        """
        self._check()
        whole = self.whole
        if whole is not None:
            return whole if isinstance(whole, list) else (whole,)
        return self.shards or ()

    def _check(self) -> None:
        self.settle()
        if self.error is not None:
            raise self.error.fresh()

    def move(self, domain: Domain) -> None:
        """Moves the arrays to another domain of this process, without a copy."""
        if self.domain is domain or self.error is not None:
            return
        try:
            shards = self.singles()
            self.shards = [
                shard if isinstance(shard, Strings) else domain.adopt(shard, device)
                for shard, device in zip(shards, self.devices, strict=True)
            ]
        except Exception as error:  # noqa: BLE001 - the part carries it
            self.error = PartError.of(error, self.epoch)
            self.shards = None
        self.whole = None
        self.domain = domain
        self.epoch = 0 if self.error is None else self.error.epoch


@final
class Store:
    """Parts by number."""

    def __init__(self, home: Domain) -> None:
        self._home = home
        self._parts: dict[int, Part] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def set(self, aid: int, part: Part) -> None:
        """Keeps a part."""
        self._parts[aid] = part

    def get(self, aid: int) -> Part:
        """The part of that number; one with an error if there is none."""
        part = self._parts.get(aid)
        if part is None:
            error = PartError(Code.FAILED_PRECONDITION, f"buffer {aid} is not on this host")
            return Part.failed(self._home, error)
        return part

    def fail(self, aids: Iterable[int], error: PartError) -> None:
        """Keeps an error under these numbers; nothing of the domain that it comes from is kept."""
        for aid in aids:
            self._parts[aid] = Part.failed(self._home, error)

    def find(self, aid: int) -> Part | None:
        """The part of that number, if there is one."""
        return self._parts.get(aid)

    def all(self) -> list[Part]:
        """Every part that there is."""
        return list(self._parts.values())

    def free(self, aids: Iterable[int]) -> None:
        """Drops parts; those still in use elsewhere live on there."""
        for aid in aids:
            self._parts.pop(aid, None)

    def adopt_idle(self, keep: Domain | None) -> int:
        """Moves ready arrays of ended epochs home, so that their clients can go; how many."""
        moved = 0
        for part in list(self._parts.values()):
            if part.domain is self._home or part.domain is keep or part.pending:
                continue
            if _can_move(part):
                part.move(self._home)
                moved += 1
        return moved


def is_ready(part: Part) -> bool:
    """Whether nothing is to be waited for: all values are there, or an error is."""
    if part.pending:
        return False
    if part.error is not None:
        return True
    try:
        # A token of XLA's cannot be asked.
        return all(hasattr(array, "is_ready") and array.is_ready() for array in part.arrays())
    except Exception:  # noqa: BLE001 - `wait_for` raises it again, where it is told
        return True


def _can_move(part: Part) -> bool:
    if part.error is not None or isinstance(part.whole, list):
        return False
    try:
        return all(not is_given_away(array) and array.is_ready() for array in part.arrays())
    except Exception:  # noqa: BLE001 - a failed array has nothing to move
        return False


def _given_away(part: Part) -> bool:
    """Whether a later program was given the arrays: then its results tell what became of them."""
    if part.error is not None or part.pending:
        return False
    return any(is_given_away(array) for array in part.arrays())


def wait_for(parts: Iterable[Part], done: Callable[[Any], None] | None = None) -> None:
    """Waits until all parts hold values.

    Raises:
        PartError: The first error found.
    """
    for part in parts:
        try:
            for array in part.arrays():
                array.block_until_ready()
        except Exception as error:  # noqa: BLE001 - XLA raises many kinds
            if not _given_away(part):
                raise PartError.of(error, part.epoch) from None
        part.epoch = 0
        if done is not None:
            done(part)
