"""Host buffers on their way: into a session's memory, and out of it without a copy."""

from __future__ import annotations

from typing import Final, Protocol, final

from regrow.errors import Code, StatusError
from regrow.wire import grpc
from regrow.wire.frames import CANCEL
from regrow.wire.streams import Stream

_CHUNK_BYTES: Final = 512 << 10
_DATA_TAG: Final = 0x0A  # field 1, length-delimited
_MAX_PREFIX_BYTES: Final = grpc.PREFIX_BYTES + 11


class Session(Protocol):
    """What the transport asks of a session."""

    @property
    def session_id(self) -> int:
        """The number under which other calls find the session."""

    def request(self, data: bytes) -> None:
        """One serialized IfrtRequest, in order of arrival."""

    def store_begin(self, handle: int, size: int) -> memoryview:
        """Writable memory of `size` bytes for a host buffer; StatusError refuses it."""

    def store_end(self, handle: int) -> None:
        """The host buffer is complete."""

    def store_abort(self, handle: int) -> None:
        """The host buffer will not become complete."""

    def lookup(self, handle: int) -> memoryview | None:
        """A host buffer; it lives until `delete` or `closed`."""

    def delete(self, handle: int) -> None:
        """Free a host buffer."""

    def closed(self) -> None:
        """The session has ended. Once."""


@final
class Transfers:
    """The transfers of one session, on whichever connection.

    Attributes:
        session: The session.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._stores: set[Store] = set()
        self._lookups: dict[int, set[Lookup]] = {}
        self._deletes: set[int] = set()

    def add_store(self, store: Store) -> None:
        """A store begins."""
        self._stores.add(store)

    def remove_store(self, store: Store) -> None:
        """A store has ended."""
        self._stores.discard(store)

    def add_lookup(self, lookup: Lookup) -> memoryview:
        """A lookup begins.

        Raises:
            StatusError: There is no such buffer.
        """
        handle = lookup.handle
        view = None if handle in self._deletes else self.session.lookup(handle)
        if view is None:
            raise StatusError(Code.INVALID_ARGUMENT, f"there is no host buffer {handle}")
        self._lookups.setdefault(handle, set()).add(lookup)
        return view

    def remove_lookup(self, lookup: Lookup) -> None:
        """A lookup has ended, so that a delete that waited for it can be done."""
        handle = lookup.handle
        active = self._lookups.get(handle)
        if active is None or lookup not in active:
            return
        active.discard(lookup)
        if active:
            return
        del self._lookups[handle]
        if handle in self._deletes:
            self._deletes.discard(handle)
            self.session.delete(handle)

    def delete(self, handle: int) -> None:
        """Delete a buffer, as soon as nothing is being sent from it."""
        if handle in self._lookups:
            self._deletes.add(handle)
        else:
            self.session.delete(handle)

    def close(self) -> None:
        """Let go of the session's memory, which is about to be freed."""
        lookups = [lookup for active in self._lookups.values() for lookup in active]
        self._lookups.clear()
        for lookup in lookups:
            lookup.cancel()
        for store in list(self._stores):
            store.refuse(StatusError(Code.FAILED_PRECONDITION, "the session has ended"))


@final
class Store:
    """A HostBufferStore call.

    A call that is refused still reads all that the client sends before it answers: a client whose
    writes fail reports an INTERNAL error of its own instead of ours.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._transfers: Transfers | None = None
        self._handle = 0
        self._target = memoryview(b"")
        self._at = 0
        self._left = 0  # of the message that is being received
        self._partial = bytearray()  # the beginning of a message
        self._error: StatusError | None = None
        self._done = False

    def begin(self, transfers: Transfers, handle: int, size: int) -> None:
        """Get the memory; StatusError if the session refuses."""
        if size < 0:
            raise StatusError(Code.INVALID_ARGUMENT, f"a host buffer of {size} bytes")
        view = transfers.session.store_begin(handle, size)
        self._target = view.cast("B") if view.nbytes else view
        self._handle = handle
        self._transfers = transfers
        transfers.add_store(self)

    def refuse(self, error: StatusError) -> None:
        """Fail, as soon as the client has sent everything."""
        self._error = self._error or error
        self._abort()

    def data(self, view: memoryview) -> None:
        """Copy what could not be received in place."""
        if self._error is not None or self._done:
            return
        try:
            while len(view):
                view = view[self._take(view) if self._left else self._begin_message(view) :]
        except StatusError as error:
            self.refuse(error)

    def room(self) -> memoryview | None:
        """The rest of the message that is being received."""
        if not self._left:
            return None
        return self._target[self._at : self._at + self._left]

    def filled(self, count: int) -> None:
        """Bytes came in place."""
        self._at += count
        self._left -= count

    def ended(self) -> None:
        """Answer."""
        if self._done:
            return
        if self._error is None and (self._left or self._partial or self._at < len(self._target)):
            self.refuse(
                StatusError(
                    Code.INVALID_ARGUMENT,
                    f"host buffer {self._handle} was to have {len(self._target)} bytes, "
                    f"but {self._at} came",
                )
            )
        if self._error is None:
            self._complete()
        self._done = True
        if self._error is None:
            grpc.answer(self._stream, b"")
        else:
            grpc.fail(self._stream, self._error)

    def over(self) -> None:
        """The call broke off, or its answer is out."""
        self._abort()

    def _complete(self) -> None:
        transfers, self._transfers = self._transfers, None
        assert transfers is not None
        self._target = memoryview(b"")
        transfers.remove_store(self)
        try:
            transfers.session.store_end(self._handle)
        except Exception as error:  # noqa: BLE001 - whatever it was, the client is told
            self._error = grpc.status_of(error, "HostBufferStore")

    def _abort(self) -> None:
        transfers, self._transfers = self._transfers, None
        self._target = memoryview(b"")
        self._at = self._left = 0
        self._partial.clear()
        if transfers is not None:
            self._done = self._error is None
            transfers.remove_store(self)
            transfers.session.store_abort(self._handle)

    def _take(self, view: memoryview) -> int:
        step = min(self._left, len(view))
        self._target[self._at : self._at + step] = view[:step]
        self._at += step
        self._left -= step
        return step

    def _begin_message(self, view: memoryview) -> int:
        """Read the beginning of a message; returns how many bytes of `view` belong to it."""
        known = len(self._partial)
        self._partial += view[: _MAX_PREFIX_BYTES - known]
        head = self._partial
        if len(head) < grpc.PREFIX_BYTES:
            return len(view)
        compressed, size = grpc.unpack_prefix(head)
        if compressed:
            raise StatusError(Code.UNIMPLEMENTED, "compressed messages are not supported")
        if size:
            start = _payload_start(head)
            if start is None:
                return len(view)
            self._left = size + grpc.PREFIX_BYTES - start
        else:
            start = grpc.PREFIX_BYTES
        if self._at + self._left > len(self._target):
            raise StatusError(
                Code.INVALID_ARGUMENT,
                f"host buffer {self._handle} was to have {len(self._target)} bytes, but more came",
            )
        self._partial = bytearray()
        return start - known


def _payload_start(head: bytearray) -> int | None:
    """Where a message's data begin; None if more bytes are needed to tell."""
    _, size = grpc.unpack_prefix(head)
    if len(head) == grpc.PREFIX_BYTES:
        return None
    if head[grpc.PREFIX_BYTES] != _DATA_TAG:
        raise StatusError(Code.INVALID_ARGUMENT, "a message of a host buffer has no data")
    length = shift = 0
    for index in range(grpc.PREFIX_BYTES + 1, len(head)):
        length |= (head[index] & 127) << shift
        shift += 7
        if head[index] < 128:
            if length + index + 1 != size + grpc.PREFIX_BYTES:
                raise StatusError(
                    Code.INVALID_ARGUMENT, "a message of a host buffer has more than data"
                )
            return index + 1
    if len(head) == _MAX_PREFIX_BYTES:
        raise StatusError(Code.INVALID_ARGUMENT, "a message of a host buffer is damaged")
    return None


@final
class Lookup:
    """A HostBufferLookup call, which sends from the session's memory itself.

    Attributes:
        handle: The host buffer.
    """

    def __init__(self, stream: Stream, transfers: Transfers, handle: int) -> None:
        self.handle = handle
        self._stream = stream
        self._transfers = transfers

    def start(self) -> None:
        """Queue the whole buffer; StatusError if it is not there."""
        view = self._transfers.add_lookup(self)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        stream = self._stream
        stream.headers(grpc.RESPONSE)
        if not view:
            stream.write(grpc.prefix(0))
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            tag = b"\x0a" + grpc.varint(len(chunk))
            stream.write(grpc.prefix(len(tag) + len(chunk)) + tag)
            stream.write(chunk)
        stream.finish(grpc.TRAILERS_OK)

    def cancel(self) -> None:
        """The session ends: send no more of its memory."""
        self._stream.reset(CANCEL)

    def data(self, view: memoryview) -> None:
        """The request is complete; nothing more is expected."""

    def room(self) -> memoryview | None:
        """Nothing more is expected."""
        return None

    def filled(self, count: int) -> None:
        """Nothing more is expected."""

    def ended(self) -> None:
        """The request is complete."""

    def over(self) -> None:
        """The memory is no longer needed."""
        self._transfers.remove_lookup(self)
