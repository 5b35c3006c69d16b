"""The head of a Ray cluster on this machine: started with the right flags, found again, ended.

    REGROW_HOME/ray/head.json   the head that was started
    REGROW_HOME/ray/lock        held while one is started or ended
    the temporary directory     sockets and logs of Ray; removed when the head is ended

All processes of the head, and of nodes that were started from it, carry the mark of the run: other
clusters of Ray on this machine, which `ray stop` would end as well, are left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from regrow.errors import ClusterStartError, NoClusterError, UsageError, WaitTimeout
from regrow.home import Home
from regrow.locks import lock
from regrow.processes import RUN_MARK, end_all, end_run, marked, name_of, python_argv
from regrow.ray.causes import mismatch, one_line
from regrow.ray.cluster import require_ray
from regrow.ray.knock import ADDRESS_VARIABLE
from regrow.ray.settings import (
    HANG_AFTER_S,
    START_ENVIRON,
    check_node_resources,
    health_environ,
)
from regrow.ray.start import RAYLET_DIED

DEFAULT_PORT: Final = 6379
DEFAULT_DASHBOARD_PORT: Final = 8265
_START_S: Final = 180.0
# Others of this machine may start before it.
_NODE_START_S: Final = 380.0
_TRIES: Final = 3
_POLITE_S: Final = 3.0
_LOCK_S: Final = 200.0
_ADDRESS: Final = re.compile(r"ray start --address='([^']+)'")
_DASHBOARD: Final = re.compile(r"RAY_API_SERVER_ADDRESS='(http://[^']+)'")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_TEMP_DIR: Final = 29
_FIRST_BLOCK: Final = 16
_BLOCKS: Final = 32


@final
@dataclass(frozen=True, slots=True)
class RayHead:
    """A head that was started here.

    Attributes:
        run_id: Mark of its processes.
        address: HOST:PORT for nodes and drivers.
        dashboard: URL for jobs.
        temp_dir: Sockets and logs of Ray.
    """

    run_id: str
    address: str
    dashboard: str
    temp_dir: str

    @property
    def runs(self) -> bool:
        """Whether its controller (GCS) runs."""
        return any(name_of(pid) == "gcs_server" for pid in marked(self.run_id))

    def start_node(self, *options: str, environ: Mapping[str, str] | None = None) -> None:
        """Starts a further node on this machine, marked as the head's.

        Args:
            options: Further words of `ray start`.
            environ: Further variables.

        Raises:
            ClusterStartError: If it does not start.
        """
        words = [f"--address={self.address}", *options]
        _ray_start(words, self.run_id, environ or {}, _NODE_START_S)

    def add_node(self, resources: Mapping[str, float], num_cpus: int = 1) -> str:
        """Starts a further node on an address of its own; returns that.

        Raises:
            UsageError: If no node can have these resources.
            ClusterStartError: If it does not start.
        """
        check_node_resources(resources)
        block = _FIRST_BLOCK + int(self.run_id[-4:], 16) % _BLOCKS
        address = f"127.{block}.{secrets.randbelow(200) + 1}.{secrets.randbelow(250) + 1}"
        self.start_node(
            f"--node-ip-address={address}",
            f"--num-cpus={num_cpus}",
            f"--resources={json.dumps(dict(resources))}",
            "--include-log-monitor=false",
        )
        return address

    def end(self) -> None:
        """Ends all its processes, and those of nodes started from it, and what they left."""
        deadline = time.monotonic() + _POLITE_S
        end_all(marked(self.run_id), signum=signal.SIGTERM)
        while marked(self.run_id) and time.monotonic() < deadline:
            time.sleep(0.05)
        end_run(self.run_id)
        shutil.rmtree(self.temp_dir, ignore_errors=True)


def start_head(
    *,
    host: str = "",
    port: int = DEFAULT_PORT,
    dashboard_port: int = DEFAULT_DASHBOARD_PORT,
    num_cpus: int = 0,
    hang_after_s: float = HANG_AFTER_S,
    options: Sequence[str] = (),
    begun: Callable[[RayHead], None] = lambda _: None,
) -> RayHead:
    """Starts a head of this process's own; nothing is entered in the home.

    Args:
        host: Its address; default: what Ray finds.
        port: Where nodes and drivers connect; 0: any.
        dashboard_port: Where jobs are submitted, on the loopback interface; 0: any.
        num_cpus: Of the head's node; 0 keeps work off it.
        hang_after_s: A node that is silent for so long is dead.
        options: Further words of `ray start`.
        begun: Is given the head, which has no address yet, before any process of it is there.

    Raises:
        UsageError: If the address is none of this machine.
        ClusterStartError: If a port is taken, or it does not start.
        UnsupportedError: If Ray is not installed.
    """
    require_ray()
    health = health_environ(hang_after_s)
    _check_free(host, port)
    _check_free("127.0.0.1", dashboard_port)
    words = [
        "--head",
        f"--port={port}",
        f"--num-cpus={num_cpus}",
        "--include-dashboard=true",
        f"--dashboard-port={dashboard_port}",
        *([f"--node-ip-address={host}"] if host else []),
        *options,
    ]
    for _ in range(_TRIES - 1):
        try:
            return _start_head(words, health, begun)
        except ClusterStartError as error:
            # It gives its agents 15 s to import what they need, which a busy machine may not do.
            if RAYLET_DIED not in str(error):
                raise
    return _start_head(words, health, begun)


def _check_free(host: str, port: int) -> None:
    """Returns if a port can be had; Ray would join the head that has it, or give up in many words."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            told = f"{host!r} is no address of this machine ({error.strerror})"
            raise UsageError(told) from None
        raise ClusterStartError(
            f"port {port} is taken: another Ray head may have it; take another port, or 0 for any"
        ) from None


def _start_head(
    words: Sequence[str], health: dict[str, str], begun: Callable[[RayHead], None]
) -> RayHead:
    run_id = f"ray-{secrets.token_hex(8)}"
    # Ray's sockets are in there, whose paths must be short.
    base = tempfile.gettempdir()
    base = base if len(base) <= _LONGEST_TEMP_DIR else "/tmp"  # noqa: S108 - mkdtemp's are private
    temp_dir = tempfile.mkdtemp(prefix="rg-ray-", dir=base)
    head = RayHead(run_id, "", "", temp_dir)
    try:
        begun(head)
        # The dashboard's processes leave directories behind.
        environ = health | {"TMPDIR": temp_dir}
        text = _ray_start([*words, f"--temp-dir={temp_dir}"], run_id, environ, _START_S)
        address, dashboard = _ADDRESS.search(text), _DASHBOARD.search(text)
        if address is None or dashboard is None:
            raise ClusterStartError(f"ray start told no addresses: {one_line(text)}")
    except BaseException:
        head.end()
        raise
    return dataclasses.replace(head, address=address[1], dashboard=dashboard[1])


def _ray_start(words: Sequence[str], run_id: str, more: Mapping[str, str], limit_s: float) -> str:
    """Runs `ray start`; returns what it says."""
    argv = python_argv("regrow.ray.start", "--disable-usage-stats", *words)
    # RAY_ADDRESS is for clients.
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environ |= START_ENVIRON | {RUN_MARK: run_id} | dict(more)
    # What it starts keeps our pipes open: a file can be read all the same.
    with tempfile.TemporaryFile("w+") as output:
        started = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
            start_new_session=True,
        )
        try:
            status = started.wait(limit_s)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
            raise WaitTimeout("ray start to end", limit_s) from None
        output.seek(0)
        text = _COLOURS.sub("", output.read())
    if status != 0:
        raise ClusterStartError(f"Ray does not start: {_telling(text)}")
    return text


def _telling(text: str) -> str:
    if differs := mismatch(text):
        return differs
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error|ERROR|already|mismatch|failed", line)]
    return one_line((errors or lines or ["it gave no reason"])[-1])


@final
class HeadEntry:
    """The head that REGROW_HOME knows of."""

    def __init__(self, home: Path | None = None) -> None:
        """Names the directory; default: REGROW_HOME."""
        self._directory = (home or Home().path) / "ray"
        self._file = self._directory / "head.json"

    def find(self) -> RayHead:
        """The head that runs.

        Raises:
            NoClusterError: If none does; what a dead one has left has been ended then.
        """
        head = self._read()
        if head is None:
            raise NoClusterError("no Ray head was started here: regrow ray head up")
        if not head.address:
            raise NoClusterError(
                "the Ray head is being started, or its start was killed: regrow ray head up"
            )
        if not head.runs:
            self._remove(head)
            raise NoClusterError("the Ray head has died: start it again with regrow ray head up")
        return head

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds off other commands that start or end a head.

        Raises:
            WaitTimeout: If another one takes too long.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._directory / "lock").open("w") as file:
            if not lock(file, timeout_s=_LOCK_S):
                raise WaitTimeout("another command that starts or ends the Ray head", _LOCK_S)
            yield

    def up(self, **values: object) -> RayHead:
        """Starts a head and enters it.

        Args:
            **values: See `start_head`.

        Raises:
            UsageError: If one runs already.
            ClusterStartError: If it does not start.
        """
        with self.locked():
            self._end_begun()
            with contextlib.suppress(NoClusterError):
                raise UsageError(f"a Ray head runs already, at {self.find().address}")
            try:
                head = start_head(**values, begun=self._enter)  # type: ignore[arg-type]
            except BaseException:
                self._file.unlink(missing_ok=True)
                raise
            self._enter(head)
            return head

    def add_node(self, resources: Mapping[str, float], num_cpus: int) -> str:
        """Starts a further node of the head that runs, on this machine; returns its address.

        Raises:
            NoClusterError: If none runs.
            UsageError: If no node can have these resources.
            ClusterStartError: If it does not start.
        """
        return self.find().add_node(resources, num_cpus)

    def down(self) -> RayHead:
        """Ends the head; returns what it was.

        Raises:
            NoClusterError: If none was started; what a dead one has left has been ended then.
        """
        with self.locked():
            self._end_begun()
            head = self.find()
            self._remove(head)
            return head

    def _enter(self, head: RayHead) -> None:
        draft = self._file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(dataclasses.asdict(head)), encoding="utf-8")
        draft.replace(self._file)

    def _end_begun(self) -> None:
        """Ends what is left of a start that was killed: nobody starts one while we hold the lock."""
        head = self._read()
        if head is not None and not head.address:
            self._remove(head)

    def _read(self) -> RayHead | None:
        try:
            return RayHead(**json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _remove(self, head: RayHead) -> None:
        head.end()
        self._file.unlink(missing_ok=True)


def head_address(given: str | None) -> str:
    """The head that is meant: the given one, that of RAY_ADDRESS, or the one that was started here.

    Raises:
        UsageError: If there is none.
    """
    address = given or os.environ.get(ADDRESS_VARIABLE)
    if address:
        return address
    try:
        return HeadEntry().find().address
    except NoClusterError as error:
        raise UsageError(f"no Ray cluster: give --address HOST:PORT ({error})") from None
