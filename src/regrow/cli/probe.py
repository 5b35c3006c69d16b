"""`regrow doctor` as a client: it starts a stock JAX, and sees how that fares."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from regrow.cli.findings import Finding, explain
from regrow.cli.report import count
from regrow.cluster import LocalCluster
from regrow.control import request
from regrow.errors import RegrowError
from regrow.home import ClusterState, Home
from regrow.scratch import scratch
from regrow.start import client_environ

_DEADLINE_S: Final = 60.0
_DONE: Final = b"the probe has its devices"
_SCRIPT: Final = f"""
import sys, jax
print(jax.__version__, len(jax.devices()), jax.devices()[0].client.platform_version)
print({_DONE.decode()!r}, flush=True)
sys.stdin.read()
"""


def client(home: Home, name: str | None, variables: Mapping[str, str]) -> list[Finding]:
    """Starts a client as this shell would; where it is none, one of each cluster that runs.

    If none runs, a small one is made for it, in a home of its own.
    """
    if "proxy" in variables.get("JAX_PLATFORMS", "").split(","):
        return [_probe(dict(variables), None, "this shell's variables")]
    running = [home.find(name)] if name is not None else home.clusters()
    if running:
        return [
            _probe(
                dict(variables) | client_environ(state, home),
                state.control_socket,
                f"cluster {state.name}",
            )
            for state in running
        ]
    try:
        with _own_cluster() as (state, own_home):
            environ = dict(variables) | client_environ(state, own_home)
            return [_probe(environ, state.control_socket, "a cluster made for it")]
    except RegrowError as error:
        return [Finding("bad", f"a cluster of one slice does not start: {error}")]


@contextlib.contextmanager
def _own_cluster() -> Iterator[tuple[ClusterState, Home]]:
    with (
        scratch("doctor") as directory,
        LocalCluster(1, 1, name="doctor", home=directory, start_timeout_s=_DEADLINE_S),
    ):
        home = Home(directory)
        yield home.find("doctor"), home


def _probe(environ: Mapping[str, str], control: str | None, where: str) -> Finding:
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        with process:
            output, in_time = _read(process)
            told = _session(control) if in_time and _DONE in output else ""
            if not in_time:
                process.kill()
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if _DONE in output:
        jax, devices, *server = output.decode(errors="replace").split("\n")[0].split(" ", 2)
        served = f", served by {server[0]}" if server else ""
        return Finding(
            "ok",
            f"a client (jax {jax}) sees {count(int(devices), 'device')} of {where}{served}{told}",
        )
    if not in_time:
        text += f"\nUNAVAILABLE: no answer within {_DEADLINE_S:g} s"
    found = explain(text)
    return Finding("bad", f"a client with {where} fails: {found.text}", found.mend)


def _read(process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
    """What the probe prints until it has its devices or ends; False: neither in time."""
    assert process.stdout is not None
    deadline = time.monotonic() + _DEADLINE_S
    output = b""
    while _DONE not in output:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            return output, False
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            break
        output += chunk
    return output, True


def _session(control: str | None) -> str:
    """The protocol that head and probe have agreed on, where the head tells."""
    if control is None:
        return ""
    with contextlib.suppress(RegrowError):
        sessions: list[Any] = request(control, "status").get("sessions") or []
        versions = [one.get("protocol") for one in sessions if isinstance(one, dict)]
        if versions and re.fullmatch(r"\d+", str(versions[-1])):
            return f", over IFRT proxy protocol {versions[-1]}"
    return ""
