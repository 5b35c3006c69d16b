"""`LocalCluster`: slices that are processes on this machine, for programs and tests."""

from __future__ import annotations

import dataclasses
import difflib
import os
import select
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from regrow.client import ends_here
from regrow.config import ClusterOptions, HeadConfig, check_timeout
from regrow.control import Method, request
from regrow.errors import ClusterError, NoClusterError
from regrow.home import Home
from regrow.start import client_environ, complete_state, start_cluster
from regrow.supervise import Supervisor

START_DEADLINE_S: Final = 120.0
_ACT_DEADLINE_S: Final = 30.0
SUSPEND_DEADLINE_S: Final = 600.0


@final
@dataclass(frozen=True, slots=True)
class HostView:
    """A host of a slice, as it was when it was asked for.

    Attributes:
        index: Its place in the slice.
        state: What it is doing.
        pid: Its process id; None while it has no process.
    """

    index: int
    state: str
    pid: int | None


@final
@dataclass(frozen=True, slots=True)
class SliceView:
    """A slice, as it was when it was asked for.

    Attributes:
        index: Its index.
        state: "down", "starting", "up", "suspect", "lost" or "stopping".
        incarnation: How often it has been started.
        hosts: Its hosts.
        story: What happened to it, the latest last.
    """

    index: int
    state: str
    incarnation: int
    hosts: tuple[HostView, ...]
    story: tuple[str, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of its hosts."""
        return tuple(host.pid for host in self.hosts if host.pid is not None)

    @classmethod
    def of(cls, status: dict[str, Any]) -> SliceView:
        """From a head's status."""
        return cls(
            status["index"],
            status["state"],
            status["incarnation"],
            tuple(HostView(h["index"], h["state"], h["pid"]) for h in status["hosts"]),
            tuple(
                f"{entry['ago_s']:.2f} s ago, incarnation {entry['incarnation']}: {entry['text']}"
                for entry in status["story"]
            ),
        )


@final
class LocalCluster:
    """Slices that are processes on this machine, and a head that JAX can connect to.

    It is up when the constructor returns, and gone when the `with` block ends, when it is
    garbage, when the interpreter exits, and when this process is killed.

        with regrow.LocalCluster(slices=2, devices_per_slice=2) as cluster:
            subprocess.run([sys.executable, "train.py"], env=os.environ | cluster.env)
            cluster.kill(1)

    Its methods may be called from any thread.
    """

    def __init__(
        self,
        slices: int = 2,
        devices_per_slice: int = 2,
        hosts_per_slice: int = 1,
        restore_after: float | None = None,
        *,
        name: str | None = None,
        home: str | os.PathLike[str] | None = None,
        start_timeout_s: float = START_DEADLINE_S,
        **options: Any,
    ) -> None:
        """Starts a cluster and waits until every slice is up.

        Args:
            slices: Number of slices.
            devices_per_slice: Devices of each slice.
            hosts_per_slice: Host processes of each slice.
            restore_after: Seconds after which a lost slice is relaunched; None: only by `restore`.
            name: Name in the home; by default a free one is chosen.
            home: Directory that it is entered in; default: REGROW_HOME, or ~/.regrow.
            start_timeout_s: How long it may take until all slices are up.
            **options: Further fields of `ClusterOptions`.

        Raises:
            UsageError: If a value is wrong.
            ClusterStartError: If it could not be started.
            TypeError: If there is no such option.
        """
        check_timeout(start_timeout_s)
        wanted = cluster_options(
            slices, devices_per_slice, hosts_per_slice, restore_after, **options
        )
        self._home = Home(home)
        self._supervisor = start_cluster(
            wanted, home=self._home, name=name, stem="local", purpose="LocalCluster"
        )
        self._finalizer = weakref.finalize(self, self._supervisor.close)
        try:
            self._supervisor.wait_healthy(start_timeout_s)
            self._state = complete_state(self._home, self._supervisor)
        except BaseException:
            self.close()
            raise
        threading.Thread(
            target=_close_with_head,
            # It is not given this object, which it would keep from being garbage.
            args=(self._supervisor, os.dup(self._supervisor.head.fd)),
            name=f"regrow-{self.name}",
            daemon=True,
        ).start()

    def __enter__(self) -> LocalCluster:
        if not self._finalizer.alive:
            raise NoClusterError(f"cluster {self.name} is closed")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self._supervisor.config
        sizes = f"slices={config.slices}, devices_per_slice={config.devices_per_slice}"
        return f"LocalCluster({sizes}, name={self.name!r})"

    def close(self) -> None:
        """Ends the cluster; may be called more than once."""
        ends_here(self.target)
        self._finalizer()

    @property
    def name(self) -> str:
        """Its name in its home."""
        return self._supervisor.state.name

    @property
    def target(self) -> str:
        """Its address, for `regrow.connect` and JAX_BACKEND_TARGET."""
        return self._supervisor.state.target

    @property
    def tcp_target(self) -> str | None:
        """Its address over TCP; None if it has none."""
        return self._state.tcp_target

    @property
    def token(self) -> str | None:
        """What clients over TCP have to present."""
        return self._state.token

    @property
    def env(self) -> dict[str, str]:
        """The variables that make a process with stock JAX its client; add them to os.environ."""
        return client_environ(self._state, self._home)

    @property
    def config(self) -> HeadConfig:
        """What its head was told."""
        return self._supervisor.config

    @property
    def head_pid(self) -> int:
        """Process id of its head."""
        return self._supervisor.head.pid

    @property
    def log_dir(self) -> str:
        """Directory of the logs of its processes, as long as it runs."""
        return self._supervisor.config.log_dir

    @property
    def slices(self) -> list[SliceView]:
        """Its slices as they are now."""
        return [SliceView.of(one) for one in self.status()["slices"]]

    def status(self) -> dict[str, Any]:
        """All there is to know, as JSON values."""
        status: dict[str, Any] = self._call("status")
        return status

    def kill(self, index: int) -> None:
        """Ends a slice's processes with SIGKILL; returns when it is lost.

        Raises:
            UsageError: If there is no such slice.
            ClusterError: If it has no processes, or the cluster is gone.
        """
        self._act("kill", index)

    def stop(self, index: int) -> None:
        """Stops a slice's processes with SIGSTOP, so that it hangs."""
        self._act("stop", index)

    def cont(self, index: int) -> None:
        """Lets a slice's processes go on.

        Raises:
            ClusterError: If it was declared lost meanwhile: its processes have been ended.
        """
        self._act("cont", index)

    def restore(self, index: int) -> None:
        """Begins to start a lost slice again; `wait_healthy` waits until it is up.

        Raises:
            ClusterError: If it is not lost.
        """
        self._act("restore", index)

    def suspend(
        self,
        slices: Sequence[int] | None = None,
        *,
        url: str | None = None,
        timeout_s: float = SUSPEND_DEADLINE_S,
    ) -> dict[str, Any]:
        """Has slices leave with their state saved; clients wait until `resume`.

        Args:
            slices: Which; None: all. One that is being resumed is suspended again, as it was.
            url: Where the state goes; None: to `gcs_scratch_location`, or the home.
            timeout_s: How long it may take, in seconds.

        Returns:
            snapshot, url, slices, bytes, written (bytes that were not there yet) and took_s.

        Raises:
            UsageError: There is no such slice or storage.
            ClusterError: It is not possible, or failed: says what has become of slices and state.
        """
        params = {"slices": slices, "url": url, "why": "LocalCluster.suspend"}
        saved: dict[str, Any] = self._call("suspend", timeout_s=timeout_s, **params)
        return saved

    def resume(
        self,
        slices: Sequence[int] | None = None,
        *,
        hosts_per_slice: int | None = None,
        timeout_s: float = SUSPEND_DEADLINE_S,
    ) -> dict[str, Any]:
        """Brings suspended slices back; returns slices and took_s when their state is there again.

        Args:
            slices: Which; None: all that are suspended.
            hosts_per_slice: With how many host processes each; None: as many as before. Another
                number is for all slices of the cluster together.
            timeout_s: How long it may take, in seconds.

        Raises:
            UsageError: There is no such slice, or its devices cannot be divided among so many hosts.
            ClusterError: They are not suspended, or their state cannot be read, or `suspend` has
                taken the resumption back: they stay so.
        """
        params = {"slices": slices, "hosts_per_slice": hosts_per_slice}
        back: dict[str, Any] = self._call("resume", timeout_s=timeout_s, **params)
        return back

    def wait_healthy(self, timeout_s: float = START_DEADLINE_S) -> None:
        """Waits until every slice is up.

        Raises:
            UsageError: If that is no time.
            WaitTimeout: If they are not at the deadline; says which.
        """
        self._call("wait_healthy", timeout_s=check_timeout(timeout_s))

    def wait_client(self, timeout_s: float = START_DEADLINE_S) -> None:
        """Waits until a client has connected.

        Raises:
            UsageError: If that is no time.
            WaitTimeout: If none has at the deadline.
        """
        self._call("wait_client", timeout_s=check_timeout(timeout_s))

    def _act(self, method: Literal["kill", "stop", "cont", "restore"], index: int) -> None:
        self._call(method, timeout_s=_ACT_DEADLINE_S, index=index)

    def _call(self, method: Method, *, timeout_s: float = _ACT_DEADLINE_S, **params: Any) -> Any:
        supervisor = self._supervisor
        if not self._finalizer.alive:
            raise NoClusterError(f"cluster {self.name} is closed")
        cause = supervisor.head.poll()
        if cause is not None:
            raise ClusterError(f"the head of cluster {self.name} has died: {cause}")
        return request(supervisor.config.control_socket, method, timeout_s=timeout_s, **params)


def cluster_options(
    slices: int = 2,
    devices_per_slice: int = 2,
    hosts_per_slice: int = 1,
    restore_after: float | None = None,
    **options: Any,
) -> ClusterOptions:
    """What the arguments of `LocalCluster` that describe the cluster mean.

    Raises:
        UsageError: If a value is wrong.
        TypeError: If there is no such option.
    """
    _check_names(options)
    return ClusterOptions(
        slices=slices,
        devices_per_slice=devices_per_slice,
        hosts_per_slice=hosts_per_slice,
        restore_after_s=restore_after,
        **options,
    )


def _check_names(options: Mapping[str, Any]) -> None:
    own = {"slices", "devices_per_slice", "hosts_per_slice", "restore_after", "name", "home"}
    own |= {"start_timeout_s"}
    known = {field.name for field in dataclasses.fields(ClusterOptions)} - {"restore_after_s"}
    for name in options:
        if name not in known:
            like = difflib.get_close_matches(name, sorted(known | own), n=1)
            hint = f"; did you mean {like[0]!r}?" if like else ""
            raise TypeError(f"LocalCluster has no argument {name!r}{hint}")


def _close_with_head(supervisor: Supervisor, head: int) -> None:
    """Waits for the head to end, and cleans up after it if nobody has asked for its end."""
    poller = select.poll()
    poller.register(head, select.POLLIN)
    while not poller.poll():
        pass
    os.close(head)
    supervisor.close()
