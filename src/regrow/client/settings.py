"""Where the cluster is, and what the environment of its clients must hold."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from regrow.errors import UsageError
from regrow.processes import with_site

TARGET_VARIABLE: Final = "REGROW_TARGET"
TOKEN_VARIABLE: Final = "REGROW_TOKEN"  # noqa: S105 (a name)
TOKEN_FILE_VARIABLE: Final = "REGROW_TOKEN_FILE"  # noqa: S105 (a name)
HEAD_DEADLINE_VARIABLE: Final = "REGROW_HEAD_DEADLINE"
DEFAULT_HEAD_DEADLINE_S: Final = 60.0
PLATFORMS: Final = "proxy,cpu"

_SCHEME: Final = "grpc://"
_NO_ADDRESS: Final = "no address of a cluster"
_ADDRESSES: Final = "write grpc://HOST:PORT or grpc://unix:/PATH"


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """A cluster as a client sees it.

    Attributes:
        target: Address of the head, `grpc://HOST:PORT` or `grpc://unix:/PATH`.
        token: What the head demands of clients that come over TCP, if anything.
        head_deadline_s: How long the head may be silent before it counts as gone; None: for ever.
    """

    target: str
    token: str | None = field(default=None, repr=False)
    head_deadline_s: float | None = DEFAULT_HEAD_DEADLINE_S

    @classmethod
    def of(cls, target: str | os.PathLike[str], token: str | None = None) -> Settings:
        """Settings from what a user wrote; every usual way to write an address is understood.

        How long the head may be silent is told by REGROW_HEAD_DEADLINE.

        Raises:
            UsageError: The target is no address, or the deadline no time.
        """
        text = os.fspath(target) if isinstance(target, os.PathLike) else target
        if not isinstance(text, str):
            raise UsageError(f"{_NO_ADDRESS}: {target!r}; {_ADDRESSES}")
        return cls(_normal_target(text), token, head_deadline_from(os.environ))

    @classmethod
    def from_environ(cls, variables: Mapping[str, str] | None = None) -> Settings | None:
        """Settings from REGROW_TARGET, REGROW_TOKEN and REGROW_TOKEN_FILE; None without a target.

        Raises:
            UsageError: The target is no address, or the file of the token cannot be read.
        """
        variables = os.environ if variables is None else variables
        target = variables.get(TARGET_VARIABLE)
        return cls.of(target, token_from(variables)) if target else None

    @property
    def address(self) -> str | tuple[str, int]:
        """Where to connect a plain socket: the path of a Unix socket, or host and port."""
        rest = self.target.removeprefix(_SCHEME)
        if rest.startswith("unix:"):
            return rest.removeprefix("unix:")
        host, _, port = rest.rpartition(":")
        return host.strip("[]"), int(port)


def token_from(variables: Mapping[str, str]) -> str | None:
    """The token of REGROW_TOKEN, else of the file that REGROW_TOKEN_FILE names, else None.

    Raises:
        UsageError: The file cannot be read.
    """
    token = variables.get(TOKEN_VARIABLE)
    if token:
        return token
    path = variables.get(TOKEN_FILE_VARIABLE)
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{TOKEN_FILE_VARIABLE}: cannot read the token from {path}: {error}"
        ) from None


def head_deadline_from(variables: Mapping[str, str]) -> float | None:
    """How long a head may be silent, in seconds, as REGROW_HEAD_DEADLINE says; None: for ever.

    Raises:
        UsageError: It says neither a number of seconds above 0 nor "never".
    """
    text = variables.get(HEAD_DEADLINE_VARIABLE, "").strip()
    if not text:
        return DEFAULT_HEAD_DEADLINE_S
    if text == "never":
        return None
    try:
        deadline_s = float(text)
    except ValueError:
        deadline_s = 0.0
    if not 0 < deadline_s < math.inf:
        raise UsageError(
            f"{HEAD_DEADLINE_VARIABLE}: {text!r} is no number of seconds above 0, nor 'never'"
        )
    return deadline_s


def environ(settings: Settings, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables, beside those of `base`, with which stock JAX in a new process is a client.

    Args:
        settings: The cluster.
        base: The environment they will be added to (default: this process's); its PYTHONPATH is
            extended, and the levels of logging it sets are kept.

    Returns:
        Only the variables to set. A script started with them needs no change; with the entry of
        PYTHONPATH the hooks of `regrow.client` install themselves when it imports JAX.
    """
    base = os.environ if base is None else base
    variables = {
        TARGET_VARIABLE: settings.target,
        "JAX_PLATFORMS": PLATFORMS,
        "JAX_BACKEND_TARGET": settings.target,
        # The client takes exactly this word; without it it demands the credentials of Google Cloud.
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        "TF_CPP_MIN_LOG_LEVEL": _log_level(base),
    }
    if settings.token:
        variables[TOKEN_VARIABLE] = settings.token
    variables["PYTHONPATH"] = with_site(base.get("PYTHONPATH", ""))
    return variables


def _normal_target(text: str) -> str:
    rest = text.strip().removeprefix(_SCHEME)
    if rest.startswith("/"):
        rest = f"unix:{rest}"
    if rest.startswith("unix:"):
        path = "/" + rest.removeprefix("unix:").lstrip("/")
        if len(os.fsencode(path)) > 107:
            raise UsageError(
                f"the path of the socket is longer than Linux allows (107 bytes): {path}"
            )
        return f"{_SCHEME}unix:{path}"
    host, colon, port = rest.rpartition(":")
    if "/" in host or not (
        colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    ):
        raise UsageError(f"{_NO_ADDRESS}: {text!r}; {_ADDRESSES}")
    return f"{_SCHEME}{rest}"


def _log_level(base: Mapping[str, str]) -> str:
    # Level 2 still logs every request that a dead head refuses, many lines for one error. The level 1
    # is what JAX sets by itself when it is imported, so it is nobody's wish.
    level = base.get("TF_CPP_MIN_LOG_LEVEL", "1")
    return "3" if level == "1" else level
