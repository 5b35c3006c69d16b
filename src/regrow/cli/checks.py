"""What `regrow doctor` looks at without starting anything."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Mapping
from typing import Any, Final

from regrow import __version__
from regrow.cli.findings import (
    CREDENTIALS_MEND,
    LEFT_MEND,
    TARGET_MEND,
    TOKEN_MEND,
    UNREACHABLE_MEND,
    Finding,
)
from regrow.cli.manager_requests import ask_manager
from regrow.cli.status import event_of
from regrow.client import Settings
from regrow.control import request
from regrow.errors import RegrowError, UsageError
from regrow.home import Home
from regrow.start import sweep_suspended

OLDEST_JAX: Final = (0, 10, 2)
TOO_NEW_JAX: Final = (0, 13)
_OLDEST_PATHWAYSUTILS: Final = (0, 1, 12)
_FEW_FILES: Final = 256
_CONNECT_DEADLINE_S: Final = 3.0


def machine() -> list[Finding]:
    """Looks at the machine."""
    findings = []
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        findings.append(
            Finding(
                "bad",
                f"this is {sys.platform} on {platform.machine()}",
                "Regrow runs on Linux on x86-64 and arm64",
            )
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FEW_FILES:
        findings.append(
            Finding("bad", f"only {soft} files may be open", f"ulimit -n {min(hard, 4096)}")
        )
    cores = len(os.sched_getaffinity(0))
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    text = f"{platform.system()} {platform.machine()}, {cores} cores, {memory_gb:.0f} GB of memory"
    return findings or [Finding("ok", text)]


def libraries() -> list[Finding]:
    """Looks at the versions of what is installed."""
    versions = {name: _version(name) for name in ("jax", "jaxlib", "pathwaysutils")}
    python = platform.python_version()
    findings = []
    for name in ("jax", "jaxlib"):
        found = versions[name]
        if found is None:
            findings.append(Finding("bad", f"{name} is not installed", "pip install jax"))
        elif not OLDEST_JAX <= _numbers(found) < TOO_NEW_JAX:
            oldest, too_new = (".".join(map(str, v)) for v in (OLDEST_JAX, TOO_NEW_JAX))
            findings.append(
                Finding(
                    "bad",
                    f"{name} {found} is not supported by Regrow {__version__}",
                    f"pip install 'jax>={oldest},<{too_new}' 'jaxlib>={oldest},<{too_new}'",
                )
            )
    text = f"regrow {__version__}, Python {python}, jax {versions['jax']}"
    findings.append(Finding("ok", f"{text}, jaxlib {versions['jaxlib']}"))
    utils = versions["pathwaysutils"]
    if utils is not None and _numbers(utils) < _OLDEST_PATHWAYSUTILS:
        findings.append(
            Finding(
                "bad",
                f"pathwaysutils {utils} deletes every live array when a slice is lost",
                "pip install 'pathwaysutils>=0.1.13'",
            )
        )
    return findings


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def environment(variables: Mapping[str, str]) -> list[Finding]:
    """Looks at what the variables of a shell make of the JAX that is started in it."""
    platforms = variables.get("JAX_PLATFORMS", "")
    target = variables.get("JAX_BACKEND_TARGET", "")
    if "proxy" not in platforms.split(","):
        if not target:
            return [Finding("ok", "this shell is no client: JAX_PLATFORMS does not name proxy")]
        now = f"is {platforms!r}" if platforms else "is not set"
        return [
            Finding(
                "bad",
                f"JAX_BACKEND_TARGET is set, but JAX_PLATFORMS {now}",
                'export JAX_PLATFORMS=proxy,cpu, or: eval "$(regrow env)"',
            )
        ]
    findings = []
    credentials = variables.get("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS")
    if credentials != "true":
        now = "not set" if credentials is None else repr(credentials)
        text = f"IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS is {now}: JAX wants Google Cloud's"
        findings.append(Finding("bad", text, CREDENTIALS_MEND))
    if not target.startswith("grpc://"):
        now = repr(target) if target else "not set"
        findings.append(Finding("bad", f"JAX_BACKEND_TARGET is {now}", TARGET_MEND))
        return findings
    try:
        settings = Settings.of(target, variables.get("REGROW_TOKEN"))
    except UsageError as error:
        return [*findings, Finding("bad", f"JAX_BACKEND_TARGET: {error}", TARGET_MEND)]
    return [*findings, *_reach(settings)]


def _reach(settings: Settings) -> list[Finding]:
    address = settings.address
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    try:
        if isinstance(address, str):
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(_CONNECT_DEADLINE_S)
                sock.connect(address)
        else:
            socket.create_connection(address, _CONNECT_DEADLINE_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        return [Finding("bad", f"nobody answers at {settings.target}: {why}", UNREACHABLE_MEND)]
    findings = [Finding("ok", f"this shell is a client of {settings.target}, which answers")]
    if not isinstance(address, str) and settings.token is None:
        text = "REGROW_TOKEN is not set, and a head wants a token over TCP unless told otherwise"
        findings.append(Finding("note", text, TOKEN_MEND))
    return findings


def token(home: Home, variables: Mapping[str, str]) -> list[Finding]:
    """Looks whether a shell's token is that of the cluster it is for, where that runs here."""
    target = variables.get("JAX_BACKEND_TARGET", "")
    given = variables.get("REGROW_TOKEN") or None
    for state in home.clusters():
        if state.tcp_target == target and state.token not in (None, given):
            what = "not set" if given is None else "not its token"
            text = f"cluster {state.name} wants a token, and REGROW_TOKEN is {what}"
            return [Finding("bad", text, TOKEN_MEND)]
    return []


def clusters(home: Home, name: str | None) -> list[Finding]:
    """Looks at what runs in a home."""
    swept = home.sweep()
    findings: list[Finding] = [
        Finding("note", f"cluster {dead} had been killed; what it had left is removed")
        for dead in swept
    ]
    left = sweep_suspended(home)
    findings += [
        Finding("note", f"a snapshot of a cluster that is gone was kept long enough: {path}")
        for path in left.removed
    ]
    findings += [
        Finding(
            "note", f"a cluster that is gone has left a snapshot: {path}", LEFT_MEND.format(path)
        )
        for path in left.left
    ]
    running = home.clusters()
    if name is not None:
        running = [home.find(name)]
    if not running:
        findings.append(Finding("ok", f"no cluster runs in {home.path}"))
    for state in running:
        try:
            ask = ask_manager if state.shared else request
            status = ask(state.control_socket, "status")
        except RegrowError as error:
            mend = f"regrow down --cluster {state.name}"
            findings.append(Finding("bad", f"cluster {state.name}: {error}", mend))
        else:
            look = _shared if state.shared else _cluster
            findings += look(state.name, status)
    return findings


def _shared(name: str, status: dict[str, Any]) -> list[Finding]:
    failed = [
        Finding(
            "bad",
            f"cluster {name}: slice {one['index']} has failed: {one['reason']}",
            "it returns by itself",
        )
        for one in status["slices"]
        if one["state"] == "failed"
    ]
    waiting = [
        Finding("note", f"cluster {name}: job {job['name']} is {job['phase']}: {job['reason']}")
        for job in status["jobs"]
        if job["phase"] != "running"
    ]
    fine = Finding("ok", f"cluster {name} is shared: {_all_up(len(status['slices']))}")
    return [*(failed or [fine]), *waiting]


def _cluster(name: str, status: dict[str, Any]) -> list[Finding]:
    slices = status["slices"]
    down = [one for one in slices if one["state"] not in ("up", "suspect")]
    if status.get("ended"):
        mend = f"regrow down --cluster {name}, then start it anew"
        return [Finding("bad", f"cluster {name}: the job has ended: {status['ended']}", mend)]
    if not down:
        return [Finding("ok", f"cluster {name}: {_all_up(len(slices))}{_speaks(status)}")]
    return [
        Finding(
            "bad",
            f"cluster {name}: slice {one['index']} is {one['state']}: {_why(one)}",
            _back(name, one),
        )
        for one in down
    ]


def _back(name: str, one: dict[str, Any]) -> str:
    """How a slice that is down comes back."""
    if one["state"] == "suspended":
        return f"regrow resume --cluster {name}"
    if one["restore_in_s"] is not None or one["state"] == "starting":
        return "it returns by itself"
    return f"regrow slice restore {one['index']} --cluster {name}"


def _why(one: dict[str, Any]) -> str:
    event = event_of(one)
    if event is None:
        return "it was never started"
    return str(event["text"]).removeprefix(f"{one['state']}: ")


def _all_up(slices: int) -> str:
    return "its slice is up" if slices == 1 else f"all {slices} slices are up"


def _speaks(status: dict[str, Any]) -> str:
    """The versions that a head speaks, where it tells."""
    texts = []
    if "jaxlib" in status:
        texts.append(f"jaxlib {status['jaxlib']}")
    if "protocol" in status:
        low, high = status["protocol"]
        texts.append(f"IFRT proxy protocol {low} to {high}")
    return f" ({', '.join(texts)})" if texts else ""
