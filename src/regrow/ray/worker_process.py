"""A worker that an actor has started: what it is comes over its standard input, secret included."""

from __future__ import annotations

import importlib
import os
import sys

import msgpack

from regrow.processes import die_with_parent, set_name


def main() -> None:
    """Is a worker, until its actor or its head ends; imports the modules it is given before."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    text = sys.stdin.buffer.read()
    if not text:
        # Its actor has ended before it was needed.
        sys.exit(0)
    told = msgpack.unpackb(text)
    die_with_parent(int(told["parent"]))
    if told["log"]:
        log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    set_name(told["name"])
    module, _, function = told["entry"].partition(":")
    getattr(importlib.import_module(module), function)(told["spec"])


if __name__ == "__main__":
    main()
