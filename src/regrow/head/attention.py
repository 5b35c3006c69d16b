"""Tells of waits that last longer than they usually do: for what, and where the client is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, TypeAlias, final

from regrow.channel import rgcb, values
from regrow.channel.frames import Buffer
from regrow.errors import ProtocolError, UnsupportedError
from regrow.head.callbacks import Callbacks
from regrow.observe import Activity, LongWait, LongWaits, Run

LOOK_S: Final = 0.5
_ANSWER_S: Final = 2.0
_SILENT_S: Final = 15.0
_TEXT_MAX: Final = 500

Tell: TypeAlias = Callable[[str, float], None]


@final
class Attention:
    """Looks at the waits of a run from time to time."""

    def __init__(
        self,
        run: Run,
        callbacks: Callbacks,
        nonces: Callable[[], Sequence[str]],
        heard: Callable[[Sequence[int]], str],
        tell: Tell,
    ) -> None:
        """Makes one that does not look yet.

        Args:
            run: The run.
            callbacks: The way to the clients.
            nonces: Those of the clients that can be asked where they are.
            heard: Says of slices when they were last heard.
            tell: Gets a line, and how long the wait has lasted.
        """
        self._run = run
        self._waits = LongWaits(run)
        self._callbacks = callbacks
        self._nonces = nonces
        self._heard = heard
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Looks now, and every `LOOK_S` from now on."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.begin)
        wait = self._waits.look(monotonic())
        if wait is None:
            return
        if wait.activity is None:
            self._ask_client(wait)
        else:
            text = f"waited {_long(wait)} for {self._what(wait.activity)}"
            self._tell(f"the client has {text}", wait.waited_s)

    def close(self) -> None:
        """Looks no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _what(self, activity: Activity) -> str:
        what = activity.what
        if not what:
            latest = self._run.latest
            what = "an array" if latest is None else f"what {latest.name} computes"
        if not activity.slices:
            return what
        names = ", ".join(map(str, activity.slices))
        return f"{what} on slice{'s' * (len(activity.slices) > 1)} {names} ({self._heard(activity.slices)})"

    def _ask_client(self, wait: LongWait) -> None:
        nonces = self._nonces()
        if not nonces:
            self._say_where(wait, "it cannot be asked where it is")
            return
        asked = _Asked(self, wait)
        self._callbacks.call(nonces[-1], rgcb.WHERE, 0, b"".join(values.encode(())), asked.answered)
        asyncio.get_running_loop().call_later(_ANSWER_S, asked.silent)

    def client_is(self, wait: LongWait, loads: bool, text: str) -> None:
        """The client has told where it is."""
        self._run.client_in(loads, monotonic())
        self._say_where(wait, f"it is {'in its data loader, ' if loads else ''}at {text}")

    def _say_where(self, wait: LongWait, text: str) -> None:
        self._tell(f"the client has asked for nothing for {_long(wait)}: {text}", wait.waited_s)

    def client_is_silent(self, wait: LongWait) -> None:
        """The client does not tell where it is; one that is about to end does not, either."""
        if wait.waited_s >= _SILENT_S:
            self._say_where(wait, "it does not answer; maybe a call holds its interpreter")


@final
class _Asked:
    """One question to a client; what comes first counts, its answer or its silence."""

    def __init__(self, attention: Attention, wait: LongWait) -> None:
        self._attention = attention
        self._wait = wait
        self._done = False

    def answered(self, answer: Buffer) -> None:
        if self._done:
            return
        self._done = True
        try:
            loads, text = _parsed(answer)
        except (ProtocolError, UnsupportedError):
            self._attention.client_is_silent(self._wait)
        else:
            self._attention.client_is(self._wait, loads, text)

    def silent(self) -> None:
        if not self._done:
            self._done = True
            self._attention.client_is_silent(self._wait)


def _parsed(answer: Buffer) -> tuple[bool, str]:
    """Whether a client is in its data loader, and where it is.

    Raises:
        ProtocolError: It did not say so.
    """
    parsed = rgcb.parse_answer(memoryview(answer))
    if isinstance(parsed, tuple):
        raise ProtocolError(parsed[1])
    told = values.decode(parsed)
    if len(told) != 2 or told[0] is None or told[1] is None or told[0].size != 1:
        raise ProtocolError("a client told where it is in a way that is not known")
    text = told[1].tobytes()[:_TEXT_MAX].decode("utf-8", "replace")
    return bool(told[0].reshape(-1)[0]), "".join(c if c.isprintable() else "?" for c in text)


def _long(wait: LongWait) -> str:
    return f"{wait.waited_s:.1f} s (usual: {wait.usual_s:.2g} s)"
