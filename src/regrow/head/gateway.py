"""Where clients come in: versions, tokens, and what a new client is told about the devices."""

from __future__ import annotations

import hmac
import logging
import re
import socket
from collections.abc import Callable
from typing import Any, Final, final

from regrow import __version__
from regrow.channel.rgcb import NONCE_KEY, TOKEN_KEY
from regrow.errors import Code, StatusError
from regrow.head.refused import RefusedSession
from regrow.head.runtime import Runtime
from regrow.head.session import Session
from regrow.head.tables import Tables
from regrow.head.topology import MEMORY_KINDS, Topology
from regrow.wire.schema import proxy

log = logging.getLogger(__name__)

PROTOCOL_MIN: Final = 16
PROTOCOL_MAX: Final = 25
PLATFORM: Final = "cpu"
_NONCE: Final = re.compile(r"[0-9a-f]{16}")


@final
class Gateway:
    """What `regrow.wire.service` calls a Gateway."""

    def __init__(self, runtime: Runtime, on_clients: Callable[[int], None]) -> None:
        self._runtime = runtime
        self._sessions: dict[int, Session] = {}
        self._next = 1
        self._on_clients = on_clients
        runtime.callbacks.refusal = self._refusal

    def negotiate(self, min_protocol: int, max_protocol: int, max_serdes: int) -> tuple[int, int]:
        """The protocol and serialisation versions to speak.

        Raises:
            StatusError: Client and server have none in common.
        """
        protocol = min(PROTOCOL_MAX, max_protocol)
        if protocol < max(PROTOCOL_MIN, min_protocol):
            raise StatusError(
                Code.FAILED_PRECONDITION,
                f"this client speaks IFRT proxy versions {min_protocol} to {max_protocol}, Regrow "
                f"{__version__} speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}: use a jax within that range "
                "(`regrow doctor` tells which)",
            )
        return protocol, max_serdes

    def open(
        self,
        protocol: int,
        serdes: int,
        init_data: dict[str, bytes | int | float | bool | list[int]],
        peer: str,
        tcp: bool,
        user_agent: str,
        send: Callable[[bytes], None],
    ) -> Session | RefusedSession:
        """A session for a client; refused if it came without the token, or speaks another protocol."""
        try:
            if tcp:
                self._check_token(init_data.get(TOKEN_KEY))
            self.negotiate(protocol, protocol, serdes)
        except StatusError as error:
            log.warning("refused %s (%s): %s", peer, user_agent, error.message)
            return RefusedSession(error, send)
        number = self._next
        self._next += 1
        nonce = _text(init_data.get(NONCE_KEY))
        if not _NONCE.fullmatch(nonce):
            nonce = ""
        if nonce:
            self._runtime.callbacks.open(nonce)
        session = Session(
            number,
            protocol,
            self._runtime,
            self._init_response,
            nonce,
            send,
            lambda: self._closed(number, nonce),
        )
        self._sessions[number] = session
        log.info(
            "session %d: %s, protocol %d, serdes %d, %s", number, peer, protocol, serdes, user_agent
        )
        self._on_clients(len(self._sessions))
        return session

    def session(self, session_id: int) -> Session | None:
        """The session of that number."""
        return self._sessions.get(session_id)

    def callback_connection(self, sock: socket.socket, nonce: str) -> None:
        """A client's connection for host callbacks."""
        self._runtime.callbacks.adopt(sock, nonce)

    @property
    def clients(self) -> int:
        """How many clients are connected."""
        return len(self._sessions)

    def tables(self) -> dict[int, Tables]:
        """What the handles of each session stand for."""
        return {number: session.tables for number, session in self._sessions.items()}

    @property
    def nonces(self) -> list[str]:
        """Of the clients that can be called back, the latest last."""
        return [session.nonce for session in self._sessions.values() if session.nonce]

    def describe(self) -> list[dict[str, int]]:
        """The sessions, as JSON values."""
        return [
            {"id": number, "protocol": session.protocol, "requests": session.requests}
            for number, session in self._sessions.items()
        ]

    def _refusal(self, sock: socket.socket, token: str) -> str | None:
        if sock.family == socket.AF_UNIX:
            return None
        try:
            self._check_token(token.encode())
        except StatusError as error:
            return error.message
        return None

    def _check_token(self, given: Any) -> None:
        tcp = self._runtime.config.tcp
        wanted = None if tcp is None else tcp.token
        if wanted is None:
            return
        if not given:
            raise StatusError(
                Code.UNAUTHENTICATED,
                "this cluster wants a token over TCP: set REGROW_TOKEN, or use regrow.connect "
                "(`regrow env` prints what to set)",
            )
        if not hmac.compare_digest(_text(given).encode(), wanted.encode()):
            raise StatusError(Code.UNAUTHENTICATED, "the token is not that of this cluster")

    def _closed(self, number: int, nonce: str) -> None:
        session = self._sessions.pop(number, None)
        if nonce:
            self._runtime.callbacks.close(nonce)
        if session is not None:
            log.info("session %d closed after %d requests", number, session.requests)
        self._on_clients(len(self._sessions))

    def _init_response(self, session_id: int) -> Any:
        response = proxy.IfrtResponse()
        init = response.init_response
        init.session_id = session_id
        init.platform_name = PLATFORM
        init.platform_version = f"regrow {__version__}"
        init.process_index = 0
        init.runtime_type = "regrow"
        # What JAX reads of a backend by name: jax.export asks which form of a program it takes.
        init.client_attributes.attributes["serialize_with_sdy"].bool_value = True
        for device in range(self._runtime.topology.devices):
            _add_device(init, device, self._runtime.topology)
        return response


def _add_device(init: Any, device: int, topology: Topology) -> None:
    slice_index = topology.slice_of(device)
    told = init.all_devices.add()
    told.id = told.local_device_id = told.local_hardware_id = device
    told.platform_name = told.device_kind = PLATFORM
    told.to_string = f"SliceDevice(id={device}, slice={slice_index})"
    told.debug_string = told.to_string
    first = device * len(MEMORY_KINDS)
    told.default_memory_id = first
    told.memory_ids.extend(range(first, first + len(MEMORY_KINDS)))
    within = device % topology.devices_per_slice
    numbers = {
        "slice_index": slice_index,
        "colocation_id": device,
        "core_on_chip": 0,
        "num_cores": 1,
    }
    for name, number in numbers.items():
        told.attributes.attributes[name].int64_value = number
    told.attributes.attributes["coords"].int64_list_value.elements.extend((within, 0, 0))
    init.primary_device_ids.append(device)
    init.addressable_device_ids.append(device)
    for kind_id, kind in enumerate(MEMORY_KINDS):
        memory = init.memories.add()
        memory.id = first + kind_id
        memory.memory_space_kind = kind
        memory.kind_id = kind_id
        memory.device_ids.append(device)
        memory.to_string = memory.debug_string = f"{kind}_{device}"


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""
