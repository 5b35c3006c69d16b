"""A worker that an actor has started: what it is comes over its standard input, secret included."""

from __future__ import annotations

import importlib
import os
import sys

import msgpack

from regrow.processes import die_with_parent, set_name


def main() -> None:
    """Is a worker, until its actor or its head ends."""
    told = msgpack.unpackb(sys.stdin.buffer.read())
    die_with_parent(int(told["parent"]))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    set_name(told["name"])
    module, _, function = told["entry"].partition(":")
    getattr(importlib.import_module(module), function)(told["spec"])


if __name__ == "__main__":
    main()
