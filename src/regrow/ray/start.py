"""`ray start`, sooner and with more patience: where several raylets share a machine its own may not do.

    python -m regrow.ray.start [--head] …    the words of `ray start`

Ray asks for the new node for 30 s, and a raylet ends itself when its agents, which import much, are not
up 15 s later. So the node is waited for longer, and one whose raylet has ended is started again. Two
raylets that start at once would take the same socket: this file is locked while one does. And each has
its own directory for runtime environments, a new one at each start. Before all that a node waits for its
head, which Ray would try for a quarter of an hour; and what has been started for a head ends with whoever
starts it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from regrow.errors import NoRayHeadError, RegrowError
from regrow.locks import lock
from regrow.processes import RUN_MARK, end_run
from regrow.ray.knock import knock

RAYLET_DIED: Final = "Ray's raylet has died at its start"
_PATIENCE_S: Final = 150.0
_LOCK_S: Final = 200.0
_POLL_S: Final = 0.1
_HEAD_S: Final = 30.0
_ADDRESS: Final = "--node-ip-address="
_HEAD: Final = "--address="
_TEMP_DIR: Final = "--temp-dir="
_TRIES: Final = 4
# Within each question for the new node Ray waits so long for it, and would not see a raylet die.
_ASK_ENVIRON: Final = {"RAY_raylet_start_wait_time_s": "1"}
_TRY_VARIABLE: Final = "REGROW_RAY_START_TRY"
# Ray's program goes on without its other commands; their imports (Serve, pandas) take thrice as long.
_UNNEEDED: Final = (
    "ray.dashboard.modules.job.cli",
    "ray.serve.scripts",
    "ray.util.state.state_cli",
)


def _ray_start() -> Any:
    """The command, without what it does not need."""
    for name in _UNNEEDED:
        # None makes their import an ImportError.
        sys.modules[name] = None  # type: ignore[assignment]
    from ray.scripts.scripts import start

    return start


def _end_with(starter: int) -> None:
    """Ends what has been started for a head when whoever starts it is killed: nobody would know of it."""
    run_id = os.environ.get(RUN_MARK, "")
    temp_dirs = [word.removeprefix(_TEMP_DIR) for word in sys.argv if word.startswith(_TEMP_DIR)]
    if not run_id:
        return
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(starter)], [], [])
    end_run(run_id)
    for temp_dir in temp_dirs:
        shutil.rmtree(temp_dir, ignore_errors=True)
    os._exit(1)


def _await_head(patience_s: float) -> None:
    """Waits until a head answers; Ray would try for a quarter of an hour."""
    address = next(word.removeprefix(_HEAD) for word in sys.argv if word.startswith(_HEAD))
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return knock(address)
        except RegrowError as error:
            if not isinstance(error, NoRayHeadError) or time.monotonic() > deadline:
                raise SystemExit(f"Error: {error}") from None
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Holds off other raylets that start on this machine."""
    # Not inherited: a raylet would hold the lock.
    descriptor = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not lock(descriptor, timeout_s=_LOCK_S):
            text = f"Error: waited {_LOCK_S:g} s for other raylets of this machine to start"
            raise SystemExit(text)
        # One that has died meanwhile is not waited for: that would hold off the others.
        _await_head(0.0)
        yield
    finally:
        os.close(descriptor)


def _keep_apart() -> None:
    """Gives the runtime environments of this node a place of their own.

    Ray unpacks them anew for each node: where several share a machine, over those that are in use. And
    a raylet takes nothing that an earlier one of its address has made, but fails where it is in the way;
    what makes it may go on for a while when that raylet is killed.
    """
    from ray._private import node, ray_constants

    addresses = (word.removeprefix(_ADDRESS) for word in sys.argv if word.startswith(_ADDRESS))
    for address in addresses:
        prefix = f"{ray_constants.DEFAULT_RUNTIME_ENV_DIR_NAME}-{address}-"
        ray_constants.DEFAULT_RUNTIME_ENV_DIR_NAME = f"{prefix}{secrets.token_hex(4)}"
        create = node.try_to_create_directory

        def clear_and_create(path: str, prefix: str = prefix, create: Any = create) -> None:
            if Path(path).name.startswith(prefix):
                _remove_earlier(Path(path), prefix)
            create(path)

        node.try_to_create_directory = clear_and_create


def _remove_earlier(own: Path, prefix: str) -> None:
    """Removes what earlier raylets of an address have left, while this one starts."""
    for earlier in own.parent.glob(f"{prefix}*"):
        if earlier != own:
            threading.Thread(target=shutil.rmtree, args=(earlier, True)).start()


def _be_patient(last_try: bool) -> None:
    """Has each of Ray's questions for the new node wait by itself."""
    from ray._private import services

    ask = services.get_node
    deadline = time.monotonic() + _PATIENCE_S

    def get_node(*arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return ask(*arguments, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                if _a_child_has_died():
                    if last_try:
                        raise SystemExit(f"Error: {RAYLET_DIED}") from None
                    os.execv(  # noqa: S606 - itself
                        sys.executable, [sys.executable, "-P", __file__, *sys.argv[1:]]
                    )
                time.sleep(_POLL_S)

    services.get_node = get_node


def _a_child_has_died() -> bool:
    """Whether the raylet, say, is there to be reaped; one that is stopped (SIGSTOP) is ended."""
    try:
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOHANG)
    except ChildProcessError:
        return True
    if child is not None and child.si_code == os.CLD_STOPPED:
        os.kill(child.si_pid, signal.SIGKILL)
        # The next try would take it for its own raylet.
        os.waitpid(child.si_pid, 0)
    return child is not None


def main() -> None:
    """Runs `ray start`."""
    os.environ |= _ASK_ENVIRON
    start, is_head = _ray_start(), "--head" in sys.argv
    number = int(os.environ.get(_TRY_VARIABLE, "0")) + 1
    os.environ[_TRY_VARIABLE] = str(number)
    # A second head would find the port of the first one's controller taken.
    _be_patient(last_try=number >= _TRIES or is_head)
    _keep_apart()
    if is_head:
        # A thread, since the kernel would end only this process.
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    else:
        _await_head(_HEAD_S)
    # A head has a directory of its own for its sockets.
    with contextlib.nullcontext() if is_head else _alone():
        start(["--dashboard-agent-listen-port=0", *sys.argv[1:]], prog_name="ray start")


if __name__ == "__main__":
    main()
