"""The worker's end of host callbacks: functions for XLA that call back into the user's process.

    relay = CallbackRelay(send, freed)     # send(call, nonce, token, index, payload) to the head
    callbacks = HostCallbacks(relay, rgcb.callbacks_of(program))
    client.compile_and_load(module, devices, options, host_callbacks=callbacks.functions)
    …
    relay.answered(call, payload)          # the head's answer, from the thread that reads the channel
    callbacks.close()                      # the executable is gone; launches of it may still run

XLA wraps what a function raises into an INTERNAL error with a traceback of this process, which callers
of JAX take for a lost slice. `user_error` turns that back into the error that was meant.
"""

from __future__ import annotations

import base64
import itertools
import queue
import re
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias, final

from regrow.channel import rgcb, values
from regrow.errors import Code, RegrowError, StatusError, WaitTimeout

Send: TypeAlias = Callable[[int, str, int, int, bytes], None]
Freed: TypeAlias = Callable[[str, int], None]
HostFunction: TypeAlias = Callable[..., tuple[Any, ...]]

# Longer than the head waits for the user's function: the head's answer says more.
_ANSWER_TIMEOUT_S: Final = 3700.0
_COLLECT_PERIOD_S: Final = 0.2
_MARK: Final = re.compile(r"<regrow-callback ([A-Z_]+) ([A-Za-z0-9+/=]*)>")
_XLA: Final = re.compile(
    r"CpuCallback error|xla_(?:ffi|buffer)_(?:partitioned_)?python_\w+_callback"
)


class _Left(NamedTuple):
    """A program that the worker has closed, but that XLA may still hold."""

    callbacks: rgcb.ProgramCallbacks


class HostCallbackError(RegrowError):
    """What a function for XLA raises; its text carries the status through XLA's own error."""

    def __init__(self, code: Code, text: str) -> None:
        packed = base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")
        super().__init__(f"<regrow-callback {code.name} {packed}>")


def marked(code: Code, text: str) -> str:
    """A text that `user_error` knows again in any error which holds it."""
    return str(HostCallbackError(code, text))


def user_error(error: BaseException | str) -> StatusError | None:
    """The status that a failed host callback meant; None if the error is of another kind.

    Args:
        error: What XLA raised, or its text, whole: a part of it may lack what is needed.

    Returns:
        An error free of the words that mean a lost slice, except where the callback itself used
        the cluster and met a lost slice.
    """
    text = str(error)
    found = _MARK.search(text)
    if found is not None:
        code, message = Code[found[1]], base64.b64decode(found[2]).decode("utf-8", "replace")
        if code is Code.DATA_LOSS:
            return StatusError(code, message)
        return StatusError.user(code, message)
    if _XLA.search(text):
        message = re.sub(r"\A[A-Z_]+: ", "", text)
        return StatusError.user(Code.UNKNOWN, f"a host callback failed: {message}")
    return None


@final
class CallbackRelay:
    """Calls on their way to the head and answers on their way back; for any number of threads."""

    def __init__(
        self, send: Send, freed: Freed, answer_timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> None:
        """Begins with no call.

        Args:
            send: Sends a call (number, nonce, token, index, values) to the head.
            freed: Tells the head that one program with the callbacks of (nonce, token) is gone.
            answer_timeout_s: How long a call waits for the head's answer.
        """
        self._freed = freed
        self._send = send
        self._answer_timeout_s = answer_timeout_s
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[values.Buffer]] = {}
        self._closed: bytes | None = None
        self._events: queue.SimpleQueue[rgcb.ProgramCallbacks | _Left | None] = queue.SimpleQueue()
        self._reporter: threading.Thread | None = None

    def report_dropped(self, program: object, callbacks: rgcb.ProgramCallbacks) -> None:
        """Tells the head about these callbacks once `program` is garbage."""
        with self._lock:
            if self._reporter is None:
                self._reporter = threading.Thread(
                    target=self._report, name="regrow-callbacks-freed", daemon=True
                )
                self._reporter.start()
        # The last reference may go anywhere, also where a lock is held: only the queue is touched.
        weakref.finalize(program, self._events.put, callbacks).atexit = False

    def expect_drop(self, callbacks: rgcb.ProgramCallbacks) -> None:
        """A program whose drop is to be reported is left to XLA from now on."""
        self._events.put(_Left(callbacks))

    def _report(self) -> None:
        left: set[rgcb.ProgramCallbacks] = set()
        while True:
            try:
                event = self._events.get(timeout=_COLLECT_PERIOD_S if left else None)
            except queue.Empty:
                _collect_xla_garbage()
                continue
            if event is None:
                return
            if isinstance(event, _Left):
                left.add(event.callbacks)
            else:
                left.discard(event)
                self._freed(event.nonce, event.token)

    def call(self, nonce: str, token: int, index: int, payload: bytes) -> values.Buffer:
        """Waits for the answer to a call: a frame of `channel.rgcb`.

        Raises:
            WaitTimeout: No answer came.
        """
        answers: queue.SimpleQueue[values.Buffer] = queue.SimpleQueue()
        number = next(self._numbers)
        with self._lock:
            if self._closed is not None:
                return self._closed
            self._waiting[number] = answers
        try:
            self._send(number, nonce, token, index, payload)
            return answers.get(timeout=self._answer_timeout_s)
        except queue.Empty:
            what = "the head to answer a host callback"
            raise WaitTimeout(what, self._answer_timeout_s) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def answered(self, number: int, answer: values.Buffer) -> None:
        """The answer to a call is here; one that nobody waits for is dropped."""
        with self._lock:
            answers = self._waiting.get(number)
        if answers is not None:
            answers.put(answer)

    def close(self, text: str) -> None:
        """Fails the calls in flight and those to come, for this reason."""
        answer = rgcb.failure(Code.CANCELLED, text)
        with self._lock:
            self._closed = answer
            waiting = list(self._waiting.values())
        self._events.put(None)
        for answers in waiting:
            answers.put(answer)


@final
class HostCallbacks:
    """The host callbacks of one executable.

    XLA keeps the functions as long as it may call them, also those of an executable that was dropped
    while it runs; when the last of them goes, the client hears that it may forget its own.

    Attributes:
        functions: For XLA, in the order of the program's callbacks.
    """

    def __init__(self, relay: CallbackRelay, callbacks: rgcb.ProgramCallbacks) -> None:
        calls = _Calls(relay, callbacks)
        self.functions = tuple(_function(calls, index) for index in range(callbacks.number))
        self._calls: _Calls | None = calls
        self._callbacks = callbacks
        self._relay = relay
        relay.report_dropped(calls, callbacks)

    def when_entered(self, entered: Callable[[], None]) -> None:
        """Has a function called whenever a call begins, from a thread of XLA's.

        XLA holds the inputs of the program by then.
        """
        if self._calls is not None:
            self._calls.entered = entered

    def close(self) -> None:
        """Leaves the functions to XLA alone."""
        if self._calls is not None:
            self._relay.expect_drop(self._callbacks)
            self._calls = None
            self.functions = ()


@final
class _Calls:
    """What the functions of one executable share, and what lives as long as one of them."""

    def __init__(self, relay: CallbackRelay, callbacks: rgcb.ProgramCallbacks) -> None:
        self.entered: Callable[[], None] | None = None
        self._relay = relay
        self._callbacks = callbacks

    def call(self, index: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.entered is not None:
            self.entered()
        nonce, token, _ = self._callbacks
        try:
            payload = b"".join(values.encode(arguments))
            answer = rgcb.parse_answer(memoryview(self._relay.call(nonce, token, index, payload)))
            if not isinstance(answer, tuple):
                return tuple(values.decode(answer))
        except RegrowError as error:
            raise HostCallbackError(Code.UNKNOWN, f"a host callback failed: {error}") from None
        raise HostCallbackError(*answer)


def _collect_xla_garbage() -> None:
    """XLA's threads cannot drop Python objects; jaxlib does it for them, when it is asked to."""
    jaxlib = sys.modules.get("jaxlib._jax")
    if jaxlib is not None:
        jaxlib.collect_garbage()


def _function(calls: _Calls, index: int) -> HostFunction:
    def function(*arguments: Any) -> tuple[Any, ...]:
        return calls.call(index, arguments)

    return function
