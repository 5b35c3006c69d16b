"""What `regrow` commands and a head say to each other over the cluster's control socket.

Each line is a JSON object. A request is `{id, method, params}`; its answer is `{id, result}` or
`{id, error: {type, message, ...}}`, where `type` names a class of `regrow.errors`. After the method
`events` the head goes on to send `{event: ...}` on that connection, one for each `Event`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any, Final, Literal, TypedDict, final

from regrow import errors
from regrow.errors import (
    ControlError,
    ControlLostError,
    NoClusterError,
    OptionError,
    RegrowError,
    WaitTimeout,
)

MAX_LINE_BYTES: Final = 1 << 20
DEFAULT_TIMEOUT_S: Final = 10.0
# A head that was asked to wait answers at its own deadline; this is what its answer may take.
_GRACE_S: Final = 5.0

Method = Literal[
    "ping",
    "status",
    "kill",
    "stop",
    "cont",
    "restore",
    "suspend",
    "resume",
    "suspend_job",
    "suspend_requested",
    "wait_healthy",
    "wait_client",
    "wait_step",
    "wait_phase",
    "fault",
    "progress",
    "traced",
    "timeline",
    "events",
    "lease",
    "withdraw",
    "give_back",
    "shutdown",
]
EventKind = Literal[
    "slice_up",
    "slice_lost",
    "slice_suspended",
    "slice_resumed",
    "client_connected",
    "client_gone",
    "job_ends",
    "elastic_event",
    "long_wait",
    "warning",
    "lease_lost",
]


class Event(TypedDict):
    """Something that happened in a cluster.

    Keys:
        kind: What.
        slice: Index of the slice, None where it concerns none. lease_lost: that of the machines.
        incarnation: Incarnation of the slice, None where it concerns none. lease_lost: of the lease.
        text: The cause, in words; may be empty. elastic_event: its timeline, in several lines.
        took_s: slice_up: since its start was due; slice_lost: how long it had been up;
            elastic_event: how long it took; long_wait: how long it has lasted.
        at: Seconds since 1970.
    """

    kind: EventKind
    slice: int | None
    incarnation: int | None
    text: str
    took_s: float | None
    at: float


def encode(message: dict[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def error_to_json(error: Exception) -> dict[str, Any]:
    """How an answer carries an error."""
    name = type(error).__name__ if isinstance(error, RegrowError) else "ControlError"
    text: dict[str, Any] = {"type": name, "message": str(error)}
    if isinstance(error, WaitTimeout):
        text |= {"what": error.what, "timeout_s": error.timeout_s}
    if isinstance(error, OptionError):
        text |= {"option": error.option, "problem": error.problem}
    return text


def error_from_json(answer: object) -> RegrowError:
    """The error that an answer carries; a `ControlError` where its type is not known here."""
    if not isinstance(answer, dict):
        return ControlError(f"the head sent an error that is none: {answer!r}")
    message = str(answer.get("message"))
    if answer.get("type") == "WaitTimeout" and "what" in answer and "timeout_s" in answer:
        return WaitTimeout(str(answer["what"]), float(answer["timeout_s"]))
    if answer.get("type") == "OptionError" and "option" in answer and "problem" in answer:
        return OptionError(str(answer["option"]), str(answer["problem"]))
    kind = getattr(errors, str(answer.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, RegrowError):
        # A class that takes more than a message cannot be made again from one.
        with contextlib.suppress(TypeError):
            return kind(message)
    return ControlError(message)


@final
class ControlConnection:
    """A connection to the control socket of a head (see `Method`) or of another, for one thread.

    Attributes:
        path: Path of the socket.
    """

    def __init__(
        self, path: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, who: str = "head"
    ) -> None:
        """Connects.

        Args:
            path: Path of the socket.
            timeout_s: How long it may take to connect, or to send a request.
            who: What messages call the other side.

        Raises:
            NoClusterError: If nobody listens there.
        """
        self.path = path
        self._who = who
        self._inbox = bytearray()
        self._last_id = 0
        self._events: list[Event] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise NoClusterError(
                f"no {self._who} answers at {path}: {error.strerror or error}; it is not running"
            ) from None

    def __enter__(self) -> ControlConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes it."""
        self._socket.close()

    def fileno(self) -> int:
        """Its file descriptor, to wait for events with a selector."""
        return self._socket.fileno()

    def send(self, method: str, **params: Any) -> int:
        """Sends a request; returns its id."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            raise ControlError(f"the {self._who} is gone: {error.strerror or error}") from None
        return self._last_id

    def call(
        self, method: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **params: Any
    ) -> Any:
        """Sends a request and waits for its answer.

        Args:
            method: What to do.
            timeout_s: How long the answer may take. For the `wait_` methods it is sent along, and
                None lets them wait without end.
            **params: Parameters of the method.

        Raises:
            ControlError: If the head is gone or does not answer.
            RegrowError: What the head refused the request with.
        """
        if method.startswith("wait_"):
            params["timeout_s"] = timeout_s
            timeout_s = None if timeout_s is None else timeout_s + _GRACE_S
        number = self.send(method, **params)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            for message in self._receive(deadline, method):
                if message.get("id") != number:
                    continue
                if "error" in message:
                    raise error_from_json(message["error"])
                return message.get("result")

    def _receive(self, deadline: float | None, what: str) -> list[dict[str, Any]]:
        """Waits for bytes; returns the answers they complete, and keeps the events."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise ControlError(f"the {self._who} did not answer {what!r} in time; it may hang")
        self._socket.settimeout(left)
        try:
            chunk = self._socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError as error:
            raise ControlLostError(f"the {self._who} is gone: {error.strerror or error}") from None
        if not chunk:
            raise ControlLostError(f"the {self._who} ended before it answered {what!r}")
        return self._parse(chunk)

    def _parse(self, chunk: bytes) -> list[dict[str, Any]]:
        self._inbox += chunk
        *lines, rest = self._inbox.split(b"\n")
        self._inbox = bytearray(rest)
        if len(rest) > MAX_LINE_BYTES:
            raise ControlError(f"the {self._who} sent a line that is too long")
        answers = []
        for line in lines:
            message = json.loads(line)
            if "event" in message:
                self._events.append(message["event"])
            else:
                answers.append(message)
        return answers

    def subscribe(self) -> None:
        """Has the head send its events on this connection from now on."""
        self.call("events")

    def take(self) -> tuple[list[Event], list[dict[str, Any]]]:
        """Reads what is there without waiting: events, and answers to `send`.

        Raises:
            ControlError: If the head is gone.
        """
        answers: list[dict[str, Any]] = []
        self._socket.settimeout(0)
        while True:
            try:
                chunk = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                raise ControlError(f"the {self._who} is gone: {error.strerror or error}") from None
            if not chunk:
                raise ControlError(f"the {self._who} has ended")
            answers += self._parse(chunk)
        events, self._events = self._events, []
        return events, answers


def request(
    path: str, method: str, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **params: Any
) -> Any:
    """Makes one request on a connection of its own (see `ControlConnection.call`)."""
    with ControlConnection(path) as connection:
        return connection.call(method, timeout_s=timeout_s, **params)
