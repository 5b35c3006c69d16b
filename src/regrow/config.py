"""What a cluster is to be like, and what its head is told when it starts."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast, final, get_args

from regrow.errors import OptionError, UsageError

LogLevel = Literal["debug", "info", "warning", "error"]
MAX_SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket that Linux takes."""

MAX_DEVICES: Final = 4096
"""Most devices of a cluster: the compiler makes a client with all of them."""

DEFAULT_HOST: Final = "127.0.0.1"
IN_HOME: Final = "in the home"
"""Stands for the directory of a home where compiled programs are kept."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LONGEST_SOCKET_NAME: Final = "/workers.sock"


def check_name(name: str) -> str:
    """Returns `name` if it can be the name of a cluster.

    Raises:
        UsageError: If it cannot.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a cluster: use letters, digits, '.', '_' and '-', "
            "64 at most, beginning with a letter or digit"
        )
    return name


def check_timeout(timeout_s: float) -> float:
    """Returns `timeout_s` if it can be how long something may take.

    Raises:
        UsageError: If it cannot.
    """
    if not _is_number(timeout_s) or timeout_s < 0:
        raise UsageError(f"{timeout_s!r} is no timeout; it must be a number of seconds from 0 up")
    return timeout_s


@final
@dataclass(frozen=True, slots=True)
class TcpConfig:
    """Where the head listens for clients beside its Unix socket.

    Attributes:
        host: Address to bind.
        port: Port to bind; 0 takes any free one.
        token: What a client has to present; None only together with `HeadConfig.allow_no_token`.
    """

    host: str
    port: int
    token: str | None = None


RayStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@final
@dataclass(frozen=True, slots=True)
class RayConfig:
    """Where slices come from if they come from a Ray cluster.

    Attributes:
        address: HOST:PORT of its head.
        resources: What each host of a slice needs of a node, by the name of the resource.
        strategy: How the hosts of a slice are laid out over nodes; STRICT_SPREAD: a node each.
        other_machines: Whether hosts may be on other machines than the head, which they then reach
            over TCP, all of them.
        spares: Places for slices that are held, with hosts that have imported JAX, for lost ones.
    """

    address: str
    resources: dict[str, float]
    strategy: RayStrategy = "STRICT_SPREAD"
    other_machines: bool = False
    spares: int = 0

    def __post_init__(self) -> None:
        if not self.resources or not all(
            type(name) is str and _is_number(value) and value > 0
            for name, value in self.resources.items()
        ):
            raise UsageError(
                f"{self.resources!r} are no resources of Ray: give names and numbers above 0, "
                'such as {"TPU": 4}'
            )
        if type(self.spares) is not int or self.spares < 0:
            raise UsageError(f"spares is {self.spares!r}; it must be 0 or more")
        if self.strategy not in get_args(RayStrategy):
            raise UsageError(f"strategy {self.strategy!r} is none of {get_args(RayStrategy)}")


@final
@dataclass(frozen=True, slots=True)
class TpuConfig:
    """Where slices come from if they are those of the local Cloud TPU.

    Attributes:
        endpoint: URL of its API.
        project: Where the queued resources are, with
        zone: their zone.
        queued: Their ids, and how many slices each has: the first has slice 0, and so on.
    """

    endpoint: str
    project: str
    zone: str
    queued: list[tuple[str, int]]

    def slice(self, index: int) -> tuple[str, int]:
        """The queued resource that has a slice, and its place in that."""
        for queued_id, slices in self.queued:
            if index < slices:
                return queued_id, index
            index -= slices
        raise UsageError(f"the queued resources have {-index} slices too few")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What a cluster is to be like (the meaning of each is told in `HeadConfig`).

    Attributes:
        host: Address for clients over TCP.
        port: Port for clients over TCP, 0 for any; None: no TCP.
        token: What clients over TCP must present; by default a random one is made.
        allow_no_token: Let clients over TCP come without a token.
        compile_cache_dir: Where compiled programs are kept; default: in the home; None: nowhere.
        log_dir: Where the logs of its processes are kept; None: as long as it runs.
        tpu: The queued resources that slices come from; None: they are processes of this machine.
        machines_socket: Socket of the hosts that are leased to it; None: it has its own.
        worker_port: Port where its hosts join from other machines; None: they are local.
        ray: The Ray cluster that slices come from; None: they are processes of this machine.
    """

    slices: int = 2
    devices_per_slice: int = 2
    hosts_per_slice: int = 1
    restore_after_s: float | None = None
    num_elastic_instances: int | None = None
    hang_after_s: float = 5.0
    reconnect_s: float = 3.0
    start_deadline_s: float = 60.0
    host: str = DEFAULT_HOST
    port: int | None = None
    token: str | None = None
    allow_no_token: bool = False
    compile_cache_dir: str | None = IN_HOME
    allow_colocated_python: bool = True
    log_dir: str | None = None
    log_level: LogLevel = "info"
    metrics_port: int | None = None
    tpu: TpuConfig | None = None
    machines_socket: str | None = None
    worker_port: int | None = None
    gcs_scratch_location: str | None = None
    grace_s: float = 30.0
    resume_after_s: float | None = None
    ray: RayConfig | None = None
    spare_snapshots: bool = False

    def tcp(self) -> TcpConfig | None:
        """Where to listen for clients over TCP; makes a token where one is wanted and none given.

        Raises:
            UsageError: There is no port, but more that is for TCP only.
        """
        if self.port is None:
            if self.allow_no_token or self.host != DEFAULT_HOST:
                raise UsageError(
                    "a host, and leave to come without a token, are for clients over TCP: say "
                    "--port (port=), too; 0 takes a free one"
                )
            return None
        token = self.token
        if token is None and not self.allow_no_token:
            token = secrets.token_urlsafe(24)
        return TcpConfig(self.host, self.port, token)


@final
@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Everything a head needs to know; fixed for its whole life.

    Attributes:
        name: Name of the cluster.
        run_id: Id that marks the cluster's processes (see `processes.RUN_MARK`).
        home: The REGROW_HOME that the cluster is entered in.
        dir: The cluster's own directory, mode 0700.
        socket_dir: Directory of its sockets; `dir` unless that path is too long for a socket.
        slices: Number of slices.
        devices_per_slice: Devices of each slice.
        hosts_per_slice: Host processes of each slice; each owns as many of its devices.
        restore_after_s: A lost slice is relaunched after so many seconds; None: never by itself.
        num_elastic_instances: How many slices may come and go while a client lives; None: all.
        hang_after_s: A host that is silent for so long is lost.
        reconnect_s: A break of the connection to a host that is shorter than this is no loss.
        start_deadline_s: A host that is not up so long after its start is lost.
        tcp: Where to listen for clients over TCP; None: nowhere.
        allow_no_token: Whether clients over TCP may come without a token.
        compile_cache_dir: Where compiled programs are kept; None: nowhere.
        allow_colocated_python: Whether a client's own Python may run on the hosts.
        logs: Directory for the logs of its processes; None: one within `dir`.
        log_level: What the head writes to its log.
        metrics_port: Port of the loopback interface where Prometheus finds metrics, 0 for any;
            None: nowhere.
        tpu: The queued resources that slices come from; None: they are processes of this machine.
        machines_socket: Socket of the machines whose slices are leased to this head (see
            `regrow.jobs.machines`); None: slices are processes of its own.
        worker_port: Port, on every address, where hosts join from other machines (`regrow worker`;
            they present the token of `tcp`), 0 for any; None: hosts are processes of its own.
        gcs_scratch_location: Path or fsspec URL where the state of suspended slices goes; None: in the
            home.
        grace_s: How long a host that was told of its end has until then.
        resume_after_s: Slices that were suspended by such a notice are started again after so many
            seconds; None: when asked.
        ray: The Ray cluster that slices come from; None: they are processes of this machine.
        spare_snapshots: Whether a replica of each snapshot is kept for who takes a lost slice's place
            (see `regrow.head.spare_snapshots`); for leased slices.
        lifeline_fd: Read end of a pipe whose write end the supervisor holds.
        supervisor_fd: A pidfd of the supervisor.
    """

    name: str
    run_id: str
    home: str
    dir: str
    socket_dir: str
    slices: int = 2
    devices_per_slice: int = 2
    hosts_per_slice: int = 1
    restore_after_s: float | None = None
    num_elastic_instances: int | None = None
    hang_after_s: float = 5.0
    reconnect_s: float = 3.0
    start_deadline_s: float = 60.0
    tcp: TcpConfig | None = None
    allow_no_token: bool = False
    compile_cache_dir: str | None = None
    allow_colocated_python: bool = True
    logs: str | None = None
    log_level: LogLevel = "info"
    metrics_port: int | None = None
    tpu: TpuConfig | None = None
    machines_socket: str | None = None
    worker_port: int | None = None
    gcs_scratch_location: str | None = None
    grace_s: float = 30.0
    resume_after_s: float | None = None
    ray: RayConfig | None = None
    spare_snapshots: bool = False
    lifeline_fd: int | None = None
    supervisor_fd: int | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        self._check_sizes()
        self._check_times()
        self._check_tcp()
        if self.log_level not in get_args(LogLevel):
            raise UsageError(f"log level {self.log_level!r} is none of {get_args(LogLevel)}")
        if len(f"{self.socket_dir}{_LONGEST_SOCKET_NAME}".encode()) > MAX_SOCKET_PATH_BYTES:
            raise UsageError(f"{self.socket_dir} is too long a path for a Unix socket")

    def _check_sizes(self) -> None:
        for what in ("slices", "devices_per_slice", "hosts_per_slice"):
            value = getattr(self, what)
            if type(value) is not int or value < 1:
                raise OptionError(what, f"is {value!r}; it must be a number from 1 up")
        if self.devices_per_slice % self.hosts_per_slice:
            raise UsageError(
                f"{self.devices_per_slice} devices per slice cannot be shared out evenly to "
                f"{self.hosts_per_slice} hosts per slice"
            )
        if self.slices * self.devices_per_slice > MAX_DEVICES:
            raise UsageError(
                f"{self.slices} slices of {self.devices_per_slice} devices are more than the "
                f"{MAX_DEVICES} devices that a cluster may have"
            )
        elastic = self.num_elastic_instances
        if elastic is not None and (type(elastic) is not int or elastic < 0):
            raise OptionError("num_elastic_instances", f"is {elastic!r}; it must be 0 or more")
        if self.spare_snapshots and self.machines_socket is None:
            raise OptionError("spare_snapshots", "is for jobs of a shared cluster")

    def _check_times(self) -> None:
        for what in ("hang_after_s", "reconnect_s", "start_deadline_s", "grace_s"):
            value = getattr(self, what)
            if not _is_number(value) or value <= 0:
                raise OptionError(what, f"is {value!r}; it must be a number of seconds above 0")
        for what in ("restore_after_s", "resume_after_s"):
            after = getattr(self, what)
            if after is not None and (not _is_number(after) or after < 0):
                raise OptionError(what, f"is {after!r}; it must be 0 or more seconds")

    def _check_tcp(self) -> None:
        if self.metrics_port is not None and not _is_port(self.metrics_port):
            raise UsageError(f"metrics port {self.metrics_port!r} is no TCP port")
        if self.worker_port is not None and (self.tcp is None or not _is_port(self.worker_port)):
            raise UsageError(
                f"worker port {self.worker_port!r}: it must be a TCP port, and clients must come "
                "over TCP, too: hosts present the same token"
            )
        if self.tcp is None:
            return
        if not _is_port(self.tcp.port):
            raise UsageError(f"port {self.tcp.port!r} is no TCP port")
        if not self.tcp.token and not self.allow_no_token:
            raise UsageError(
                "clients over TCP need a token; to let everyone in who reaches the port, "
                "say so with --allow-no-token (allow_no_token=True)"
            )

    @property
    def client_socket(self) -> str:
        """Path of the Unix socket for JAX clients."""
        return f"{self.socket_dir}/client.sock"

    @property
    def worker_socket(self) -> str:
        """Path of the Unix socket for the workers."""
        return f"{self.socket_dir}/workers.sock"

    @property
    def epoch_socket(self) -> str:
        """Path of the Unix socket where the members of an epoch meet."""
        return f"{self.socket_dir}/epochs.sock"

    @property
    def control_socket(self) -> str:
        """Path of the Unix socket for `regrow` commands."""
        return f"{self.socket_dir}/control.sock"

    @property
    def log_dir(self) -> str:
        """Directory of the logs of the cluster's processes."""
        return self.logs or f"{self.dir}/logs"

    @property
    def target(self) -> str:
        """What JAX_BACKEND_TARGET is for a client on this machine."""
        return f"grpc://unix:{self.client_socket}"

    def to_json(self) -> str:
        """The JSON text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> HeadConfig:
        """Reads and checks a configuration.

        Raises:
            UsageError: If the text is no JSON object, lacks or has too many fields, or holds a
                value that is out of range.
        """
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise UsageError(f"the head's configuration is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise UsageError("the head's configuration is no JSON object")
        try:
            tcp = fields.pop("tcp", None)
            tpu, ray = fields.pop("tpu", None), fields.pop("ray", None)
            return cls(
                **fields,
                tcp=None if tcp is None else TcpConfig(**tcp),
                tpu=None if tpu is None else TpuConfig(**tpu),
                ray=None if ray is None else RayConfig(**ray),
            )
        except TypeError as error:
            raise UsageError(f"the head's configuration: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> HeadConfig:
        """Reads and checks a configuration file.

        Raises:
            UsageError: If it cannot be read, or is wrong.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"the head's configuration: {error}") from None


def _is_port(value: object) -> bool:
    return type(value) is int and 0 <= value <= 65535


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast(float, value))
