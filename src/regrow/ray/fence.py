"""Keeps ranks of an attempt that is over from writing: a token in the directory that they write to.

    DIR/.regrow-attempt         the attempt that may write; replaced as a whole
    DIR/.regrow-attempt.lock    shared while somebody writes; a new attempt waits to have it alone

On a file system with locks a new attempt begins only when no rank of an old one is in `writing`, and
none comes in afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, final

from regrow.errors import FencedError, UsageError, WaitTimeout
from regrow.locks import lock

ATTEMPT_VARIABLE: Final = "REGROW_RAY_ATTEMPT"
_TOKEN_FILE: Final = ".regrow-attempt"  # noqa: S105 - a file's name
_LOCK_FILE: Final = ".regrow-attempt.lock"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptId:
    """What a rank knows of itself; it is told by an environment variable.

    Attributes:
        job: Name of the job.
        token: Names the attempt, unlike any other.
        number: Counts the attempts of the job from 1.
        rank: This rank.
        ranks: How many there are.
        directory: The directory that the token guards; empty: none.
    """

    job: str
    token: str
    number: int
    rank: int
    ranks: int
    directory: str = ""

    def to_json(self) -> str:
        """For the environment variable."""
        return json.dumps(asdict(self))

    @property
    def key(self) -> str:
        """Where the token of the present attempt is kept in the Ray cluster."""
        return attempt_key(self.job)

    @property
    def lost_text(self) -> str:
        """What is kept under `lost_key` when the raylet of this rank's host has ended."""
        return f"{self.token} {self.rank}"

    def check(self) -> None:
        """Returns if this attempt may still write.

        Raises:
            FencedError: If a later attempt has begun.
        """
        if self.directory:
            Guard(Path(self.directory)).check(self.token)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Holds off the next attempt while the block writes to the directory.

        Raises:
            FencedError: If a later attempt has begun.
        """
        if not self.directory:
            yield
            return
        with Guard(Path(self.directory)).writing(self.token):
            yield


def attempt_key(job: str) -> str:
    """Where the token of the present attempt of a job is kept in the Ray cluster."""
    return f"attempt/{job}"


def lost_key(job: str) -> str:
    """Where a rank whose raylet has ended tells so in the Ray cluster."""
    return f"lost/{job}"


def current_attempt() -> AttemptId:
    """The attempt that this process is a rank of.

    Raises:
        UsageError: If it is none.
    """
    text = os.environ.get(ATTEMPT_VARIABLE)
    if not text:
        raise UsageError("this process is no rank of a job that regrow ray job runs")
    return AttemptId(**json.loads(text))


@final
class Guard:
    """The token of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def claim(self, token: str, *, timeout_s: float) -> None:
        """Gives the directory to an attempt; waits until nobody of an earlier one writes.

        Raises:
            WaitTimeout: If somebody of an earlier one still writes then.
            FencedError: If a later attempt has claimed it meanwhile.
            UsageError: If the directory cannot be made.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = self._open()
        except OSError as error:
            raise UsageError(f"cannot use {self._directory}: {error.strerror}") from None
        with contextlib.closing(os.fdopen(descriptor, "rb")):
            # First this, so that nobody comes in any more while those inside are waited for.
            draft = self._directory / f"{_TOKEN_FILE}.{os.getpid()}"
            draft.write_text(token, encoding="utf-8")
            draft.replace(self._directory / _TOKEN_FILE)
            if not lock(descriptor, timeout_s=timeout_s):
                what = f"ranks of an earlier attempt to stop writing to {self._directory}"
                raise WaitTimeout(what, timeout_s)
            self.check(token)

    def holder(self) -> str:
        """The token of the attempt that may write; empty if none was ever given."""
        try:
            return (self._directory / _TOKEN_FILE).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def check(self, token: str) -> None:
        """Returns if an attempt may write.

        Raises:
            FencedError: If it may not.
        """
        if self.holder() != token:
            raise FencedError(
                f"{self._directory} belongs to a later attempt: this one is over and must not write"
            )

    @contextlib.contextmanager
    def writing(self, token: str) -> Iterator[None]:
        """Holds off the next attempt during the block.

        Raises:
            FencedError: If the attempt may not write.
        """
        with contextlib.closing(os.fdopen(self._open(), "rb")) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            self.check(token)
            yield

    def _open(self) -> int:
        # Not inherited: a child that lives longer would hold the lock.
        flags = os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._directory / _LOCK_FILE, flags, 0o600)
