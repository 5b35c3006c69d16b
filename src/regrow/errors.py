"""Every exception that Regrow raises, in one tree.

    RegrowError
    ├── UsageError            a wrong flag, value or combination; exit status 2
    │   └── OptionError       the value of one option, by its name
    ├── ClusterError          a cluster could not start, or is not there; exit status 3
    │   ├── ClusterStartError
    │   ├── NoClusterError
    │   │   └── NoRayHeadError
    │   └── ControlError      the head refused or did not answer a control request
    │       └── ControlLostError  it ended before it answered
    ├── WaitTimeout           a wait passed its deadline; says what it waited for
    ├── ChannelError          head and worker do not understand each other
    │   ├── HandshakeError    wrong secret, role or incarnation
    │   └── FrameError        bytes that are no frame
    ├── ProtocolError         a client's bytes are no HTTP/2, gRPC or IFRT proxy message
    ├── ResourceError         shared memory or another bounded resource is used up
    ├── UnsupportedError      this jax, jaxlib or machine lacks something that is needed
    ├── LaunchError           a host process could not be started
    ├── SnapshotError         no snapshot of a training state can be loaded; also a RuntimeError
    ├── StorageError          suspended state cannot be written, or what is stored is damaged
    ├── CloudApiError         what the Cloud TPU API answers when it refuses a request
    ├── RayError              what a Ray cluster answers when it refuses a request
    │   └── RayJobError       a job on a Ray cluster has ended without success
    ├── FencedError           this process belongs to an attempt that is over
    └── StatusError           what a JAX client sees: a canonical code and a message
        └── SliceLostError    always code DATA_LOSS; begins "slice N"

Callers of JAX match on the words DATA_LOSS, INTERNAL, NOT_FOUND and DEADLINE_EXCEEDED to tell a lost
slice from an error of their own (pathwaysutils does), so `StatusError.user` keeps those words out of
every error that is the user's own fault.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any, Final, Self, final


class Code(enum.IntEnum):
    """Canonical status codes of gRPC and absl."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


SLICE_DOWN_WORDS: Final = ("DATA_LOSS", "DEADLINE_EXCEEDED", "NOT_FOUND", "INTERNAL")
_SLICE_DOWN_CODES: Final = frozenset(Code[word] for word in SLICE_DOWN_WORDS)
_WORDS = re.compile("|".join(SLICE_DOWN_WORDS))


class RegrowError(Exception):
    """Base of all errors of Regrow."""

    def fresh(self) -> Self:
        """The same error without its traceback, to be kept, or to be raised where it is kept.

        An error that was raised holds the frames that it passed through, and what they hold.
        """
        again = self.__class__.__new__(self.__class__, *self.args)
        again.__dict__.update(self.__dict__)
        return again


class UsageError(RegrowError):
    """A flag, a value or a combination of them is wrong."""


@final
class OptionError(UsageError):
    """The value of one option cannot be.

    Attributes:
        option: The name of the option, as Python knows it.
        problem: What is wrong with its value.
    """

    def __init__(self, option: str, problem: str) -> None:
        self.option = option
        self.problem = problem
        super().__init__(f"{option} {problem}")


class ClusterError(RegrowError):
    """Something is wrong with a cluster as a whole."""


class ClusterStartError(ClusterError):
    """The cluster could not start."""


class NoClusterError(ClusterError):
    """No running cluster goes by that name."""


@final
class NoRayHeadError(NoClusterError):
    """The head of a Ray cluster does not answer."""


class ControlError(ClusterError):
    """The head refused a control request, or did not answer it."""


@final
class ControlLostError(ControlError):
    """The head ended before it answered: what it was asked for may have been done."""


class WaitTimeout(RegrowError):
    """A wait passed its deadline.

    Attributes:
        what: What was waited for.
        timeout_s: The deadline, in seconds.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"waited {timeout_s:g} s for {what}")
        self.what = what
        self.timeout_s = timeout_s


class ChannelError(RegrowError):
    """Head and worker do not understand each other."""


class HandshakeError(ChannelError):
    """A peer presented a wrong secret, role or incarnation."""


class FrameError(ChannelError):
    """Bytes on a channel that are no frame."""


class ProtocolError(RegrowError):
    """A client's bytes are no HTTP/2, gRPC or IFRT proxy message.

    Attributes:
        code: The HTTP/2 error code (RFC 9113, section 7) that the connection ends with.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class ResourceError(RegrowError):
    """A bounded resource is used up.

    Attributes:
        what: The resource.
        wanted_bytes: The size that was asked for.
        limit_bytes: The size that there is.
    """

    def __init__(self, what: str, wanted_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{what}: {wanted_bytes} bytes wanted, the limit is {limit_bytes} bytes")
        self.what = what
        self.wanted_bytes = wanted_bytes
        self.limit_bytes = limit_bytes


class UnsupportedError(RegrowError):
    """This jax, jaxlib or machine lacks something that is needed."""


class LaunchError(RegrowError):
    """A host process could not be started."""


class SnapshotError(RegrowError, RuntimeError):
    """There is no snapshot of a training state, or nothing of it is left."""


class StorageError(RegrowError):
    """Suspended state cannot be written or read, or what is stored is not what was written."""


class CloudApiError(RegrowError):
    """The Cloud TPU API refuses a request.

    Attributes:
        code: The canonical code.
        message: What the API says.
        details: More about it, each with its "@type".
    """

    def __init__(self, code: Code, message: str, details: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.details = tuple(details)


class RayError(RegrowError):
    """A Ray cluster refuses a request."""


@final
class RayJobError(RayError):
    """A job on a Ray cluster has ended without success, and is not tried again.

    Attributes:
        status: An exit status for it: that of its program, or 1.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class FencedError(RegrowError):
    """This process belongs to an attempt that is over: a later one has begun."""


class StatusError(RegrowError):
    """An error for a JAX client: a canonical code and a message.

    Attributes:
        code: The canonical code; the client shows it in front of the message.
        message: One sentence or more, without the code.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message

    @classmethod
    def user(cls, code: Code, message: str) -> StatusError:
        """An error that is the user's own fault, free of the words that mean a lost slice."""
        if code in _SLICE_DOWN_CODES:
            code = Code.INVALID_ARGUMENT
        return cls(code, _WORDS.sub(lambda word: word.group().lower(), message))


@final
class SliceLostError(StatusError):
    """An array or a program needs a slice that is lost.

    Attributes:
        slice_index: The slice.
        incarnation: The incarnation of it that was lost.
    """

    def __init__(self, slice_index: int, incarnation: int, story: str) -> None:
        super().__init__(Code.DATA_LOSS, f"slice {slice_index} {story}")
        self.slice_index = slice_index
        self.incarnation = incarnation
