"""What tests need to know of Ray's processes."""

from __future__ import annotations

import functools
from pathlib import Path

import waiting

LONG = 300.0
until = functools.partial(waiting.until, timeout_s=LONG)


def raylet_at(address: str) -> int:
    """The raylet of the node with an address."""
    wanted = f"--node_ip_address={address}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"/raylet") and wanted in words:
            return int(entry.name)
    raise AssertionError(f"no raylet at {address}")
