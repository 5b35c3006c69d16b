"""Signals as something to wait for, together with who sent them."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Final, final

_SFD_CLOEXEC: Final = os.O_CLOEXEC
_SFD_NONBLOCK: Final = os.O_NONBLOCK
_INFO_BYTES: Final = 128
_SIGNO_ERRNO_CODE: Final = struct.Struct("=Iii")
_SIGSET_BYTES: Final = 128


@final
@dataclass(frozen=True, slots=True)
class Received:
    """A signal that has come.

    Attributes:
        number: Which.
        from_terminal: Whether the terminal sent it, to every process in its foreground.
    """

    number: signal.Signals
    from_terminal: bool


@final
class SignalQueue:
    """Signals of this (single-threaded) process, held back until they are taken."""

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = frozenset(signals)
        self._former = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        # glibc's sigset_t: a bit for each signal, signal 1 first.
        mask = sum(1 << (number - 1) for number in self._signals)
        libc = ctypes.CDLL(None, use_errno=True)
        raw = mask.to_bytes(_SIGSET_BYTES, "little")
        self._fd: int = libc.signalfd(-1, raw, _SFD_CLOEXEC | _SFD_NONBLOCK)
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"signalfd: {os.strerror(error)}")

    def __enter__(self) -> SignalQueue:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._former)

    def fileno(self) -> int:
        """Its file descriptor, to wait on with a selector."""
        return self._fd

    def take(self) -> list[Received]:
        """The signals that have come since the last call."""
        received: list[Received] = []
        while True:
            try:
                info = os.read(self._fd, _INFO_BYTES)
            except BlockingIOError:
                return received
            number, _, code = _SIGNO_ERRNO_CODE.unpack_from(info)
            # Positive codes are the kernel's own, and SIGINT of the kernel is a terminal's Ctrl-C.
            received.append(Received(signal.Signals(number), code > 0))

    def release_in_child(self) -> None:
        """To be called between fork and exec, so that the new program gets these signals."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._former)


def unwind_on_signals() -> None:
    """Has SIGTERM and SIGHUP unwind the stack, so that a cluster is ended on the way."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # What is ignored (by nohup, say) stays so.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _unwind)


def _unwind(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
