"""How a worker and the head prove to each other that they know the cluster's secret. Sans-IO.

    head    -> worker   [version, head's nonce]
    worker  -> head     [hello, worker's nonce, HMAC(secret, "worker" + both nonces + hello)]
    head    -> worker   [True, welcome, HMAC(secret, "head" + both nonces + welcome)]
                or      [False, reason, HMAC(secret, "refuse" + ...) or empty]

Each message is a u32 length and msgpack, at most 64 KiB: nothing a peer says is believed, nor much of it
read, before it has proved itself. Fresh nonces from both sides make a recorded proof worthless, and the
words in front of them keep one side's proof from being played back as the other's.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
import struct
from typing import Final, Literal, NoReturn, TypeAlias, cast, final

import msgpack

from regrow.channel.frames import Buffer
from regrow.errors import HandshakeError

PROTOCOL_VERSION: Final = 1
MAX_HANDSHAKE_BYTES: Final = 64 << 10
SECRET_BYTES: Final = 32
LENGTH: Final = struct.Struct("<I")
_NONCE_BYTES: Final = 32
_LINK_ID_BYTES: Final = 16

Role: TypeAlias = Literal["worker", "compiler"]


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker process says it is; `slice_index` and `host_index` are 0 for a compiler."""

    role: Role
    slice_index: int
    host_index: int
    incarnation: int
    pid: int


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """What a worker presents when it connects.

    Attributes:
        identity: Who it is.
        link_id: Random bytes that are the same for all connections of one channel.
        last_received: Number of the last message that came in over the channel.
    """

    identity: Identity
    link_id: bytes
    last_received: int


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
    """The head's answer: number of the last message it received, and its process id."""

    last_received: int
    pid: int


def new_secret() -> bytes:
    """A secret for a new cluster."""
    return os.urandom(SECRET_BYTES)


def new_link_id() -> bytes:
    """An id for a new channel."""
    return os.urandom(_LINK_ID_BYTES)


def body_bytes(length: Buffer) -> int:
    """The size of the message after its length field.

    Raises:
        HandshakeError: It is empty or too large to be one.
    """
    size = int(LENGTH.unpack(length)[0])
    if not 0 < size <= MAX_HANDSHAKE_BYTES:
        raise HandshakeError(f"a message of {size} bytes where a handshake was expected")
    return size


@final
class HeadHandshake:
    """The head's half: send `challenge`, give the answer to `verify`, send `welcome` or `refusal`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = os.urandom(_NONCE_BYTES)
        self._nonces: bytes | None = None

    def challenge(self) -> bytes:
        """The first message."""
        return _pack([PROTOCOL_VERSION, self._nonce])

    def verify(self, body: bytes) -> Hello:
        """The worker's hello, if its proof holds.

        Raises:
            HandshakeError: The bytes are no hello, or the secret or the version is another.
        """
        hello, nonce, proof = _fields(body, (bytes, bytes, bytes), "a hello")
        nonces = self._nonce + nonce
        if len(nonce) != _NONCE_BYTES or not _proves(self._secret, b"worker", nonces, hello, proof):
            raise HandshakeError("the secret is not that of this cluster")
        self._nonces = nonces
        return _unpack_hello(hello)

    def welcome(self, last_received: int) -> bytes:
        """The message that ends a handshake well."""
        if self._nonces is None:
            raise HandshakeError("nobody has proved to be a worker")
        fields = msgpack.packb([last_received, os.getpid()])
        return _pack([True, fields, _prove(self._secret, b"head", self._nonces, fields)])

    def refusal(self, reason: str) -> bytes:
        """The message that ends a handshake badly; its reason is proved only to a proved worker."""
        text = reason.encode()[:1000]
        proof = b"" if self._nonces is None else _prove(self._secret, b"refuse", self._nonces, text)
        return _pack([False, text, proof])


@final
class WorkerHandshake:
    """The worker's half: give the challenge to `answer`, send the result, give the reply to `finish`."""

    def __init__(self, secret: bytes, hello: Hello) -> None:
        self._secret = secret
        self._hello = hello
        self._nonces = b""

    def answer(self, body: bytes) -> bytes:
        """The hello with its proof.

        Raises:
            HandshakeError: The peer is no head, or of another version.
        """
        version, head_nonce = _fields(body, (int, bytes), "a challenge")
        if version != PROTOCOL_VERSION:
            raise HandshakeError(f"the head speaks version {version}, this is {PROTOCOL_VERSION}")
        nonce = os.urandom(_NONCE_BYTES)
        self._nonces = head_nonce + nonce
        hello = _pack_hello(self._hello)
        return _pack([hello, nonce, _prove(self._secret, b"worker", self._nonces, hello)])

    def finish(self, body: bytes) -> Welcome:
        """The head's welcome.

        Raises:
            HandshakeError: The head refuses, or does not know the secret.
        """
        welcomed, fields, proof = _fields(body, (bool, bytes, bytes), "a welcome")
        if not welcomed:
            reason = fields.decode(errors="replace")
            raise HandshakeError(f"the head refuses this process: {reason}")
        if not _proves(self._secret, b"head", self._nonces, fields, proof):
            raise HandshakeError("the head does not know the secret of this cluster")
        last_received, pid = _fields(fields, (int, int), "a welcome")
        return Welcome(last_received, pid)


def _pack(fields: list[object]) -> bytes:
    body = cast(bytes, msgpack.packb(fields))
    return LENGTH.pack(len(body)) + body


def _prove(secret: bytes, side: bytes, nonces: bytes, fields: bytes) -> bytes:
    return hmac.digest(secret, side + b"\0" + nonces + fields, "sha256")


def _proves(secret: bytes, side: bytes, nonces: bytes, fields: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(_prove(secret, side, nonces, fields), proof)


def _fields(body: bytes, types: tuple[type, ...], what: str) -> list:  # type: ignore[type-arg]
    try:
        fields = msgpack.unpackb(body, use_list=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise HandshakeError(f"bytes that are not {what}: {type(error).__name__}") from None
    if not isinstance(fields, list) or [type(field) for field in fields] != list(types):
        raise HandshakeError(f"bytes that are not {what}")
    return fields


def _pack_hello(hello: Hello) -> bytes:
    identity = hello.identity
    fields = [
        PROTOCOL_VERSION,
        identity.role,
        identity.slice_index,
        identity.host_index,
        identity.incarnation,
        identity.pid,
        hello.link_id,
        hello.last_received,
    ]
    return cast(bytes, msgpack.packb(fields))


def _unpack_hello(body: bytes) -> Hello:
    types = (int, str, int, int, int, int, bytes, int)
    version, role, slice_index, host_index, incarnation, pid, link_id, last_received = _fields(
        body, types, "a hello"
    )
    if version != PROTOCOL_VERSION:
        raise HandshakeError(f"the worker speaks version {version}, the head {PROTOCOL_VERSION}")
    numbers = (slice_index, host_index, incarnation, pid, last_received)
    if role not in ("worker", "compiler") or min(numbers) < 0 or len(link_id) != _LINK_ID_BYTES:
        _refuse_fields(role)
    return Hello(Identity(role, slice_index, host_index, incarnation, pid), link_id, last_received)


def _refuse_fields(role: str) -> NoReturn:
    raise HandshakeError(f"a hello with fields out of range, role {role[:40]!r}")
