"""The template process: it has imported JAX, and forks workers on demand.

To import JAX takes about a second and much CPU; to fork a process that has done so takes ten
milliseconds. A fork carries over one thread only, so nothing in here may start a second one: no
XLA client is made before the fork, and BLAS is told not to make a pool.

The head talks to it through a socket pair: a frame is a four-byte length and a msgpack map.
A request `{id, entry, spec, log, name}` is answered with `{id, pid}` or `{id, error}`, and
`{ping: true}` with itself. The first frame from the template is `{ready: true, threads: n}` or `{error: text}`.

The forked process is handed over to the head (which is a subreaper) by a second fork, because only
the head's own children end with it by PR_SET_PDEATHSIG and can be reaped by it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import random
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final, NoReturn

import msgpack

from regrow.processes import die_with_parent, set_name

MAX_FRAME_BYTES: Final = 16 << 20
HEADER: Final = struct.Struct("!I")
_HANDOVER_S: Final = 10.0


def pack(message: dict[str, Any]) -> bytes:
    """One frame."""
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is too long for the template")
    return HEADER.pack(len(body)) + body


def unpack(buffer: bytearray) -> list[dict[str, Any]]:
    """Takes every whole frame off the front of `buffer`."""
    messages = []
    while len(buffer) >= HEADER.size:
        (length,) = HEADER.unpack_from(buffer)
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes is too long for the template")
        end = HEADER.size + length
        if len(buffer) < end:
            break
        messages.append(msgpack.unpackb(bytes(buffer[HEADER.size : end])))
        del buffer[:end]
    return messages


def main(arguments: list[str]) -> None:
    """Runs the template.

    Args:
        arguments: The socket's file descriptor, the head's process id, the modules to import.
    """
    fd, head, *modules = arguments
    die_with_parent(int(head))
    set_name("regrow-template")
    faulthandler.enable()
    channel = socket.socket(fileno=int(fd))
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a module raises, the head has to know
        traceback.print_exc()
        channel.sendall(pack({"error": f"{type(error).__name__}: {error}"}))
        return
    threads = len(list(Path("/proc/self/task").iterdir()))
    # What is there now is shared with every worker as long as nobody writes to it.
    gc.collect()
    gc.freeze()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.sendall(pack({"ready": True, "threads": threads}))
        _serve(channel, int(head))


def _serve(channel: socket.socket, head: int) -> None:
    buffer = bytearray()
    while chunk := channel.recv(1 << 16):
        buffer += chunk
        for request in unpack(buffer):
            if "ping" in request:
                channel.sendall(pack(request))
                continue
            answer: dict[str, Any] = {"id": request["id"]}
            try:
                answer["pid"] = _fork(request, head)
            except OSError as error:
                answer["error"] = str(error)
            channel.sendall(pack(answer))


def _fork(request: dict[str, Any], head: int) -> int:
    """Forks a worker and hands it over to the head; returns its process id.

    By then it ends with the head, whatever happens to it, also if it is stopped at once.
    """
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        _in_middle(request, head, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    # Once the process between has been reaped, the worker is the head's child.
    os.waitpid(middle, 0)
    if not text.isdigit():
        raise OSError(f"fork: {text.decode(errors='replace') or 'the process between died'}")
    return int(text)


def _in_middle(request: dict[str, Any], head: int, writer: int) -> NoReturn:
    try:
        pid = os.fork()
    except OSError as error:
        os.write(writer, str(error).encode())
        os._exit(1)
    if pid == 0:
        _in_worker(request, head, writer)
    os.write(writer, str(pid).encode())
    os._exit(0)


def _in_worker(request: dict[str, Any], head: int, pipe: int) -> NoReturn:
    status = 1
    try:
        _settle(request["log"], request["name"], pipe)
        _await_handover(head)
        die_with_parent(head)
        os.close(pipe)
        module, _, function = request["entry"].partition(":")
        getattr(importlib.import_module(module), function)(request["spec"])
        status = 0
    except SystemExit as end:
        status = _exit_status(end)
    except BaseException:  # noqa: BLE001 - a forked process must never return into the template
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _exit_status(end: SystemExit) -> int:
    """What Python itself makes of `sys.exit(code)`."""
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)  # noqa: T201 - as `sys.exit("text")` does
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _settle(log: str, name: str, pipe: int) -> None:
    """Gives a forked process a session, a log and a name of its own, and no open file but the pipe."""
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(log, flags, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.closerange(3, pipe)
    os.closerange(pipe + 1, os.sysconf("SC_OPEN_MAX"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    set_name(name)
    random.seed()
    if "numpy" in sys.modules:
        # Else every worker would draw the same numbers.
        sys.modules["numpy"].random.seed()


def _await_handover(head: int) -> None:
    deadline = time.monotonic() + _HANDOVER_S
    while os.getppid() != head:
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_HANDOVER_S:g} s to become a child of the head")
        time.sleep(0.0002)


if __name__ == "__main__":
    main(sys.argv[1:])
