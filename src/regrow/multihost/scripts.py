"""What hosts are told, in the words of their shell.

All processes of a run carry a mark in their environment: the home directory of their host, which on a
machine that plays several hosts tells these apart. So they are found whatever they have done to their
parents and groups. A second mark has the id of the run as well: a run that ends takes nothing along of the
one that has replaced it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Final

MARK: Final = "REGROW_MULTIHOST"
RUN_MARK: Final = "REGROW_MULTIHOST_RUN"
DEVICES: Final = ("/dev/accel*", "/dev/vfio/*")
"""What a process holds open that has a TPU."""

LOCK_FILE: Final = "/tmp/libtpu_lockfile"  # noqa: S108 - libtpu's own
GRACE_S: Final = 5.0
"""SIGTERM to SIGKILL."""

_LIMIT_S: Final = 20.0
_POLL_S: Final = 0.1

# `grep -z` reads the environment of all processes in one go.
_END_LEFT: Final = """
sudo=; [ "$(id -u)" = 0 ] || ! command -v sudo >/dev/null || sudo="sudo -n"
left() {
  { grep -lzxF "%(mark)s" /proc/[0-9]*/environ
    %(holders)s; } 2>/dev/null | cut -d/ -f3 | sort -u
}
end_left() {
  tries=0 told=
  while set -- $(left); [ $# != 0 ]; do
    [ $tries = 0 ] && echo "ending $# process(es) of a run" >&2
    [ $tries -gt %(limit)d ] && { echo "cannot end: $*" >&2; return 1; }
    for pid; do
      case " $told " in
        *" $pid "*) [ $tries -gt %(grace)d ] && $sudo kill -KILL "$pid" ;;
        *) $sudo kill -TERM "$pid"; told="$told $pid" ;;
      esac 2>/dev/null
    done
    tries=$((tries + 1))
    sleep %(poll)s
  done
}
"""

# It waits for the end of its input, which comes with the end of whoever started the run: by then
# nothing but the command can tell it. Being nobody's child it is not in the way of a `wait`.
_RUN: Final = """
cd -- %(folder)s || exit 1
exec 3<&0 </dev/null
( ( cat <&3 >/dev/null; kill -0 $$ && end_left ) >/dev/null 2>&1 3<&3 & )
exec 3<&-
exec env %(mark)s="$HOME" %(run_mark)s %(variables)s "$(command -v bash || echo sh)" -c %(command)s
"""


def sweep(run_id: str) -> str:
    """Ends what is left of a run, and is sure of it."""
    return f"{end_left(run_id=run_id)}end_left\n"


def end_left(devices: Sequence[str] = (), run_id: str = "") -> str:
    """Defines `end_left`, which ends what an earlier run has left on a host.

    Args:
        devices: Files, as patterns, whose holders are ended as well.
        run_id: Of the run that is ended; empty: all.
    """
    names = " -o ".join(f"-lname {shlex.quote(device)}" for device in devices)
    return _END_LEFT % {
        "mark": f"{RUN_MARK}={run_id} $HOME" if run_id else f"{MARK}=$HOME",
        "holders": f"$sudo find /proc/[0-9]*/fd {names}" if devices else ":",
        "grace": GRACE_S / _POLL_S,
        "limit": _LIMIT_S / _POLL_S,
        "poll": _POLL_S,
    }


def prepare(folder: str, *, unpack: bool, devices: Sequence[str] = ()) -> str:
    """Ends what an earlier run has left, and has the run's folder there.

    Args:
        folder: Its name in the home directory.
        unpack: Whether the folder comes, packed, as standard input; else it has to be there.
        devices: See `end_left`.
    """
    name = shlex.quote(folder)
    absent = shlex.quote(f"there is no folder {folder} in the home directory")
    ready = (
        f"mkdir -p -- {name} && tar -xzf - --no-same-owner -C {name}"
        if unpack
        else f"[ -d {name} ] || {{ echo {absent} >&2; exit 2; }}"
    )
    unlock = f"rm -f {LOCK_FILE}\n" if devices else ""
    return f"{end_left(devices)}end_left || exit 1\n{unlock}{ready}\n"


def run(folder: str, command: str, variables: dict[str, str], run_id: str) -> str:
    """Runs a command in a folder; when standard input ends, it is ended with all it has started.

    Args:
        folder: Its name in the home directory.
        command: For bash.
        variables: Environment variables beside the host's own.
        run_id: No other run has it; letters and digits.
    """
    return end_left(run_id=run_id) + _RUN % {
        "folder": shlex.quote(folder),
        "mark": MARK,
        "run_mark": f'{RUN_MARK}="{run_id} $HOME"',
        "variables": " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items()),
        "command": shlex.quote(command),
    }
