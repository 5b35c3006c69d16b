"""What `regrow doctor` finds, and the error messages of stock JAX that it knows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, final

Level = Literal["ok", "note", "bad"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: Whether something is wrong with it.
        text: What was seen.
        mend: What to do about it; empty where nothing is to be done.
    """

    level: Level
    text: str
    mend: str = ""


CREDENTIALS_MEND: Final = (
    "export IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true (exactly that word), "
    'or: eval "$(regrow env)"'
)
REGISTER_MEND: Final = (
    "call regrow.connect(target), or pathwaysutils.initialize(), before JAX is first used; "
    "`regrow run` and `regrow env` arrange it without a change of the script"
)
LEFT_MEND: Final = (
    "regrow snapshot show {0}, regrow snapshot load {0} DIRECTORY; if nobody needs it: regrow "
    "snapshot rm {0} (regrow snapshot list tells when it goes by itself)"
)
TARGET_MEND: Final = (
    "set JAX_BACKEND_TARGET to grpc://HOST:PORT or grpc://unix:/PATH; `regrow env` prints it"
)
UNREACHABLE_MEND: Final = (
    "see `regrow status` for what runs, start a cluster with `regrow up` (with --port for clients "
    "elsewhere), and set the target anew with `regrow env`"
)
VERSION_MEND: Final = (
    "use versions of jax on both sides that Regrow supports; `regrow doctor` beside the head tells "
    "which it speaks"
)
TOKEN_MEND: Final = "set REGROW_TOKEN to the head's token: `regrow env --tcp` prints it"  # noqa: S105

# The first that fits is the cause: an error about credentials also says that it cannot connect.
_KNOWN: Final[tuple[tuple[str, str, str], ...]] = (
    (
        r"'proxy' is not in the list of known backends",
        "JAX does not know the backend 'proxy': nobody has registered it in this process",
        REGISTER_MEND,
    ),
    (
        r"ChannelCredentials argument is null|ALTS|[Cc]redentials .*(not|null|fail)",
        "JAX's client wants the credentials of Google Cloud",
        CREDENTIALS_MEND,
    ),
    (
        r"requires the address of an IFRT Proxy server|server address must be '<transport-type>",
        "JAX's client has no address of a head, or one without grpc:// before it",
        TARGET_MEND,
    ),
    (
        r"UNAUTHENTICATED|wants a token|the token is not|terminated: CANCELLED",
        "the head refused the client: it has no token, or a wrong one",
        TOKEN_MEND,
    ),
    (
        r"speaks? IFRT proxy versions|[Pp]rotocol version|UNIMPLEMENTED.*version|StableHLO.*version",
        "client and head have no version of the protocol, or of StableHLO, in common",
        VERSION_MEND,
    ),
    (
        r"DATA_LOSS: slice (\d+)",
        "a slice was lost with the arrays on it, and the script does not go on without it",
        "make the loop elastic (pathwaysutils' elastic_retry, say); arrays on other slices live on",
    ),
    (
        r"Connection to IFRT proxy server was terminated|head at .* is gone",
        "the head ended while the client used it, and JAX's client cannot connect again",
        "see why it ended (its log: --log-dir), and start the script anew",
    ),
    (
        r"no cluster answers at|is no head of Regrow|UNAVAILABLE|[Cc]onnection refused|[Ff]ailed to connect|No such file or directory.*\.sock"
        r"|Unable to (establish|connect)|connect(ion)? (attempt )?timed? ?out",
        "nobody answers at the client's target",
        UNREACHABLE_MEND,
    ),
    (
        r"negative strides|byte_strides|non-positive stride",
        "JAX's own client takes no NumPy array with negative or zero strides",
        REGISTER_MEND,
    ),
    (
        r"Unsupported host callback type|host callback",
        "JAX's own client cannot run host callbacks",
        REGISTER_MEND,
    ),
)


def explain(text: str) -> Finding:
    """What an error message means."""
    for pattern, cause, mend in _KNOWN:
        if re.search(pattern, text):
            return Finding("bad", cause, mend)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1][:400] if lines else "nothing"
    return Finding("bad", f"an error that is not known here: {last}")
