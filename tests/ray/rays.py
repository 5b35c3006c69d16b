"""What tests need to know of Ray's processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import waiting

LONG = 300.0
until = functools.partial(waiting.until, timeout_s=LONG)


def raylet_at(address: str) -> int:
    """The raylet of the node with an address."""
    for pid in raylets_at(address):
        return pid
    raise AssertionError(f"no raylet at {address}")


def raylets_at(address: str) -> Iterator[int]:
    """The raylets that say that they are of the node with an address."""
    wanted = f"--node_ip_address={address}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"/raylet") and wanted in words:
            yield int(entry.name)
