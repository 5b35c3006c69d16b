"""What runs on every host of a TPU: a command, its environment and its ids."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import regrow
from regrow.errors import UsageError
from regrow.ray.directories import require_writable
from regrow.ray.fence import ATTEMPT_VARIABLE, AttemptId

TPU_META: Final = "regrow-tpu"
JOB_META: Final = "regrow-job"
TOKEN_META: Final = "regrow-attempt"  # noqa: S105 - the name of a field
RANK_META: Final = "regrow-rank"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LONGEST_SETUP_S: Final = 86_400.0
EXCLUDES: Final = ("__pycache__", ".git", ".venv", "*.pyc")
"""What is not uploaded."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """A command that runs once on every host.

    Attributes:
        name: Names the job over all its attempts; two jobs of one name exclude each other.
        command: What is run, word by word.
        working_dir: A directory that is uploaded, and where it is run; empty: none.
        pip: Requirements that are installed for it.
        env: Variables for it.
        setup_s: How long a host may take to make its runtime environment, in seconds.
        directory: The directory that it writes checkpoints to: the attempts' token guards it; None:
            it writes none.
    """

    name: str
    command: Sequence[str]
    working_dir: str = ""
    pip: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    setup_s: float = 600.0
    directory: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"{self.name!r} cannot name a job: letters, digits, '.', '_' and '-'")
        if not self.command:
            raise UsageError("a job needs a command")
        if self.working_dir and not Path(self.working_dir).is_dir():
            raise UsageError(f"there is no directory {self.working_dir} to upload")
        if not 0 < self.setup_s < _LONGEST_SETUP_S:
            raise UsageError(f"setup_s must be more than 0 s and less than {_LONGEST_SETUP_S:g} s")
        if self.directory == "":
            raise UsageError("the directory for checkpoints has an empty name")
        if self.directory is not None and "://" in self.directory:
            raise UsageError(
                f"{self.directory} cannot be guarded: only directories of a file system can; leave "
                "it out, the token in the Ray cluster still ends old ranks"
            )

    def prepare(self) -> None:
        """Makes the directory, if there is none; before hosts are made that could not use it.

        Raises:
            UsageError: If it cannot be made or written.
        """
        if self.directory is not None:
            require_writable(Path(self.directory), "checkpoints")

    def entrypoint(self) -> str:
        """What Ray runs."""
        # "exec": the shell must not stand between Ray's supervisor and the rank.
        return f"exec python3 -m regrow.ray.rank -- {shlex.join(self.command)}"

    def runtime_env(self, attempt: AttemptId, more: Mapping[str, str]) -> dict[str, Any]:
        """Ray's runtime environment of one rank.

        Args:
            attempt: Which.
            more: Variables that the job's own go before.
        """
        variables = dict(more) | dict(self.env) | {ATTEMPT_VARIABLE: attempt.to_json()}
        package = Path(regrow.__file__).parent
        env: dict[str, Any] = {
            "env_vars": variables,
            # The rank's program: so that hosts need no installation of ours.
            "py_modules": [str(package)],
            "excludes": list(EXCLUDES),
            "config": {"setup_timeout_seconds": math.ceil(self.setup_s)},
        }
        if self.working_dir:
            env["working_dir"] = self.working_dir
        if self.pip:
            env["pip"] = list(self.pip)
        return env

    def metadata(self, tpu: str, attempt: AttemptId) -> dict[str, str]:
        """By which its jobs are found again."""
        return {
            TPU_META: tpu,
            JOB_META: self.name,
            TOKEN_META: attempt.token,
            RANK_META: str(attempt.rank),
            "command": json.dumps(list(self.command)),
        }
