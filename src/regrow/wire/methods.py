"""The six methods of the IFRT proxy's gRPC service."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias, final

from regrow.errors import Code, StatusError
from regrow.wire import grpc, schema
from regrow.wire.control import Accept
from regrow.wire.headers import Headers
from regrow.wire.streams import IGNORE, Handler, Stream
from regrow.wire.transfers import Lookup, Session, Store, Transfers
from regrow.wire.unary import Unary, parse

_SERVICE: Final = b"/xla.ifrt.proxy.GrpcIfrtService/"
_SESSION_KEY: Final = b"ifrt-proxy-grpc-ifrt-session-metadata-bin"
_STORE_KEY: Final = b"ifrt-proxy-grpc-host-buffer-store-metadata-bin"
_UNARY_LIMIT_BYTES: Final = 64 << 10

InitData: TypeAlias = "dict[str, bytes | int | float | bool | list[int]]"


class Gateway(Protocol):
    """Where sessions come from: the head."""

    def negotiate(self, min_protocol: int, max_protocol: int, max_serdes: int) -> tuple[int, int]:
        """The protocol and serdes versions to talk; StatusError if there is none."""

    def open(
        self,
        protocol: int,
        serdes: int,
        init_data: InitData,
        peer: str,
        tcp: bool,
        user_agent: str,
        send: Callable[[bytes], None],
    ) -> Session:
        """A new session, which answers by `send`; StatusError refuses it."""

    def session(self, session_id: int) -> Session | None:
        """The session of that number, if it lives."""

    def callback_connection(self, sock: socket.socket, nonce: str) -> None:
        """A client's callback connection, whose first 24 bytes have been read."""


@final
class Service:
    """What all connections of a server share."""

    def __init__(self, gateway: Gateway, message_limit_bytes: int) -> None:
        self.gateway = gateway
        self.message_limit_bytes = message_limit_bytes
        self._transfers: dict[int, Transfers] = {}

    def calls(self, peer: str, tcp: bool) -> Accept:
        """Who takes the calls of a new connection."""
        return Calls(self, peer, tcp).accept

    def callback_connection(self, sock: socket.socket, nonce: str) -> None:
        """A client's callback connection, whose first 24 bytes have been read."""
        self.gateway.callback_connection(sock, nonce)

    def transfers(self, session_id: int) -> Transfers:
        """The transfers of a session.

        Raises:
            StatusError: There is no such session.
        """
        session = self.gateway.session(session_id)
        if session is None:
            raise StatusError(
                Code.FAILED_PRECONDITION, f"there is no session {session_id} (any more)"
            )
        found = self._transfers.get(session_id)
        if found is None:
            found = self._transfers[session_id] = Transfers(session)
        return found

    def close(self, session: Session) -> None:
        """End a session, after all that reads or writes its memory."""
        transfers = self._transfers.pop(session.session_id, None)
        try:
            if transfers is not None:
                transfers.close()
        finally:
            session.closed()


@final
class Calls:
    """The calls on one connection."""

    def __init__(self, service: Service, peer: str, tcp: bool) -> None:
        self._service = service
        self._peer = peer
        self._tcp = tcp
        self._budget = grpc.Budget(service.message_limit_bytes)

    def accept(self, stream: Stream, fields: Headers) -> Handler:
        """The handler of a new request."""
        method = fields.get(b":path", b"").removeprefix(_SERVICE)
        try:
            if method == b"IfrtSession":
                return self._session(stream, fields)
            if method == b"HostBufferStore":
                return self._store(stream, fields)
            respond = self._unary.get(method)
            if respond is None:
                path = fields.get(b":path", b"").decode("ascii", "replace")
                raise StatusError(Code.UNIMPLEMENTED, f"there is no method {path}")
            return Unary(
                stream,
                method.decode(),
                grpc.Messages(grpc.Budget(_UNARY_LIMIT_BYTES)),
                functools.partial(respond, self, stream),
            )
        except Exception as error:  # noqa: BLE001 - whatever it was, the client is told
            grpc.fail(stream, grpc.status_of(error, method.decode("ascii", "replace")))
            return IGNORE

    def _session(self, stream: Stream, fields: Headers) -> Handler:
        metadata = parse(
            schema.proxy.GrpcIfrtSessionMetadata, grpc.binary_metadata(fields, _SESSION_KEY)
        )
        call = _Session(self._service, stream, grpc.Messages(self._budget))
        version = metadata.version
        session = self._service.gateway.open(
            version.protocol_version,
            version.ifrt_serdes_version_number,
            _init_data(metadata.initialization_data),
            self._peer,
            self._tcp,
            fields.get(b"user-agent", b"").decode("ascii", "replace"),
            call.send,
        )
        call.start(session)
        return call

    def _store(self, stream: Stream, fields: Headers) -> Handler:
        store = Store(stream)
        try:
            metadata = parse(
                schema.proxy.GrpcHostBufferStoreMetadata, grpc.binary_metadata(fields, _STORE_KEY)
            )
            transfers = self._service.transfers(metadata.session_id)
            store.begin(transfers, metadata.handle, metadata.buffer_size)
        except Exception as error:  # noqa: BLE001 - whatever it was, the client is told
            store.refuse(grpc.status_of(error, "HostBufferStore"))
        return store

    def _get_version(self, stream: Stream, data: bytes) -> None:
        request = parse(schema.proxy.GrpcGetVersionRequest, data)
        protocol, serdes = self._service.gateway.negotiate(
            request.min_version.protocol_version,
            request.max_version.protocol_version,
            request.max_version.ifrt_serdes_version_number,
        )
        response = schema.proxy.GrpcGetVersionResponse()
        response.version.protocol_version = protocol
        response.version.ifrt_serdes_version_number = serdes
        grpc.answer(stream, response.SerializeToString())

    def _lookup(self, stream: Stream, data: bytes) -> Handler:
        request = parse(schema.proxy.GrpcHostBufferLookupRequest, data)
        lookup = Lookup(stream, self._service.transfers(request.session_id), request.handle)
        lookup.start()
        return lookup

    def _delete(self, stream: Stream, data: bytes) -> None:
        request = parse(schema.proxy.GrpcHostBufferDeleteRequest, data)
        self._service.transfers(request.session_id).delete(request.handle)
        grpc.answer(stream, b"")

    def _read_from_disk(self, stream: Stream, data: bytes) -> None:
        # Clients name the files by numbers of their own, so two clients would read each other's.
        raise StatusError(
            Code.UNIMPLEMENTED,
            "this server takes no buffers from files: unset "
            "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY",
        )

    _unary: Final[dict[bytes, Callable[[Calls, Stream, bytes], Handler | None]]] = {
        b"GetVersion": _get_version,
        b"HostBufferLookup": _lookup,
        b"HostBufferDelete": _delete,
        b"HostBufferReadFromDisk": _read_from_disk,
    }


@final
class _Session:
    """An IfrtSession stream: requests come in, responses go out, until either side ends it."""

    _session: Session

    def __init__(self, service: Service, stream: Stream, messages: grpc.Messages) -> None:
        self._service = service
        self._stream = stream
        self._messages = messages
        self._whole = True
        self._open = False

    def start(self, session: Session) -> None:
        self._session = session
        self._open = True
        self._stream.headers(grpc.RESPONSE)

    def send(self, response: bytes) -> None:
        self._stream.write(grpc.prefix(len(response)) + response)

    def data(self, view: memoryview) -> None:
        if not self._open:
            return
        try:
            if self._whole and len(view) >= 5:
                compressed, size = grpc.unpack_prefix(view)
                if len(view) == size + 5 and not compressed:
                    self._session.request(bytes(view[5:]))
                    return
            for message in self._messages.feed(view):
                self._session.request(message)
            self._whole = self._messages.whole()
        except Exception as error:  # noqa: BLE001 - whatever it was, the client is told
            self._close()
            grpc.fail(self._stream, grpc.status_of(error, "the session"), answered=True)

    def room(self) -> memoryview | None:
        return None

    def filled(self, count: int) -> None:
        raise AssertionError("a session offers no room")

    def ended(self) -> None:
        self._close()
        self._stream.finish(grpc.TRAILERS_OK)

    def over(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._messages.drop()
            self._service.close(self._session)


def _init_data(attributes: Any) -> InitData:
    """An AttributeMapProto as a dictionary; values of unknown kinds are left out."""
    values: InitData = {}
    for key, value in attributes.attributes.items():
        kind = value.WhichOneof("value")
        if kind == "int64_list_value":
            values[key] = list(value.int64_list_value.elements)
        elif kind is not None:
            values[key] = getattr(value, kind)
    return values
