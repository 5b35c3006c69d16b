"""Commands that go on by themselves: `--detach`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regrow.cli.report import say
from regrow.control import error_from_json, error_to_json
from regrow.errors import ClusterStartError, RegrowError, WaitTimeout
from regrow.processes import RUN_MARK, Child, python_argv, spawn


def hand_over(ready_fd: int, lines: Sequence[str], log: Path) -> None:
    """Lets go of whoever waits for the start, and of the terminal.

    Args:
        ready_fd: As it was given by `start_detached` with `--ready-fd`.
        lines: What the user is told.
        log: Where this process writes from now on.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.write(ready_fd, json.dumps({"lines": list(lines)}).encode())
    # Its number stays taken: an error that comes later must not be written to another file.
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, ready_fd, inheritable=False)
    os.close(nowhere)


def hand_over_error(ready_fd: int, error: RegrowError) -> int:
    """Tells whoever waits for the start why there is none; returns the exit status.

    Who was told of a good start waits no longer: then it is told in the log.
    """
    say(str(error))
    with contextlib.suppress(OSError):
        os.write(ready_fd, json.dumps({"error": error_to_json(error)}).encode())
    return 1


def start_detached(what: str, start_timeout_s: float) -> int:
    """Starts this command again, in a session of its own, and waits until it has handed over.

    Args:
        what: What it starts, for messages.
        start_timeout_s: How long that may take.
    """
    reader, writer = os.pipe()
    arguments = [word for word in sys.argv[1:] if word != "--detach"]
    environ = {name: value for name, value in os.environ.items() if name != RUN_MARK}
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(Path(os.devnull).open("wb"))
        argv = python_argv("regrow", *arguments, "--ready-fd", str(writer))
        supervisor = Child(spawn(argv, environ, output=nowhere.fileno(), keep=[writer]))
    os.close(writer)
    try:
        answer = _read_all(reader, what, start_timeout_s + 10)
    except BaseException:
        supervisor.send(signal.SIGTERM)
        raise
    if "error" in answer:
        supervisor.wait(10)
        raise error_from_json(answer["error"])
    for line in answer["lines"]:
        say(line)
    return 0


def _read_all(reader: int, what: str, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    text = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WaitTimeout(f"the detached {what} to be up", timeout_s)
            chunk = pipe.read(1 << 16)
            if not chunk:
                break
            text += chunk
    if not text:
        raise ClusterStartError(f"the detached process died before the {what} was up")
    answer: dict[str, Any] = json.loads(text)
    return answer
