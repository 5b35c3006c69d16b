"""How a cluster on this machine is started, how its clients reach it, and what it leaves in its home."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from regrow.client import Settings, environ
from regrow.config import IN_HOME, ClusterOptions, HeadConfig
from regrow.control import request
from regrow.errors import NoClusterError
from regrow.home import CLUSTER_VARIABLE, HOME_VARIABLE, ClusterState, Home
from regrow.supervise import Supervisor
from regrow.suspend.abandoned import FOLDER, Swept, job_folder, sweep_abandoned
from regrow.suspend.retention import Retention, retention_from
from regrow.suspend.storage import check_url

log = logging.getLogger(__name__)


def head_config(options: ClusterOptions, home: Home, state: ClusterState) -> HeadConfig:
    """The configuration of the head of a cluster that is entered in a home.

    Raises:
        UsageError: If a value is out of range, or values contradict each other.
    """
    changed = ("host", "port", "token", "compile_cache_dir", "log_dir")
    if options.gcs_scratch_location is not None:
        check_url(options.gcs_scratch_location)
    names = [field.name for field in dataclasses.fields(options) if field.name not in changed]
    cache = options.compile_cache_dir
    return HeadConfig(
        name=state.name,
        run_id=state.run_id,
        home=str(home.path),
        dir=state.dir,
        socket_dir=state.socket_dir,
        tcp=options.tcp(),
        compile_cache_dir=str(home.path / "cache") if cache == IN_HOME else cache,
        logs=options.log_dir,
        **{name: getattr(options, name) for name in names},
    )


def start_cluster(
    options: ClusterOptions,
    *,
    home: Home | None = None,
    name: str | None = None,
    stem: str = "cluster",
    purpose: str = "",
) -> Supervisor:
    """Starts a cluster that this process supervises; does not wait until it is healthy.

    Args:
        options: What it is to be like.
        home: Where it is entered; default: REGROW_HOME.
        name: Its name; by default `stem` with the first free number.
        stem: See `name`.
        purpose: The command that it is started by.

    Raises:
        UsageError: If the options are wrong.
        ClusterStartError: If it could not be started.
    """
    home = home or Home()
    state = home.claim(name, stem=stem, purpose=purpose)
    try:
        sweep_suspended(home)
        config = head_config(options, home, state)
        if config.tcp is not None:
            state = dataclasses.replace(state, token=config.tcp.token)
        return Supervisor(home, state, config)
    except BaseException:
        home.release(state)
        raise


def complete_state(home: Home, supervisor: Supervisor) -> ClusterState:
    """Enters the cluster's TCP address, which its head knows, in the home; returns the state."""
    tcp = supervisor.config.tcp
    if tcp is not None:
        port = request(supervisor.config.control_socket, "status")["tcp_port"]
        # What is bound to every address is reached by the name of the machine.
        host = socket.gethostname() if tcp.host in ("0.0.0.0", "::", "") else tcp.host  # noqa: S104
        address = f"[{host}]" if ":" in host else host
        supervisor.state = dataclasses.replace(
            supervisor.state, tcp_target=f"grpc://{address}:{port}"
        )
        home.update(supervisor.state)
    return supervisor.state


def client_environ(state: ClusterState, home: Home, *, tcp: bool = False) -> dict[str, str]:
    """The variables with which a new process is a client of a cluster."""
    if state.shared:
        raise NoClusterError(
            f"cluster {state.name} is shared, and clients connect to jobs; "
            f"begin one with: regrow run --cluster {state.name} SCRIPT"
        )
    target, token = state.target, None
    if tcp:
        if state.tcp_target is None:
            raise NoClusterError(
                f"cluster {state.name} does not listen for TCP; start it with --port"
            )
        target, token = state.tcp_target, state.token
    named = {HOME_VARIABLE: str(home.path), CLUSTER_VARIABLE: state.name}
    return environ(Settings.of(target, token)) | named


def suspended_of(home: Home) -> tuple[Path, Callable[[], set[str]]]:
    """Where suspended state goes in a home, and what asks which folders there are in use."""

    def owned() -> set[str]:
        return {job_folder(state.name, state.run_id) for state in home.entries()}

    return home.path / FOLDER, owned


def sweep_suspended(home: Home, retention: Retention | None = None) -> Swept:
    """Removes what clusters that are gone have left of suspended state, by the rule of retention.

    Args:
        home: Whose.
        retention: The rule; None: that of REGROW_SNAPSHOT_DAYS.

    Raises:
        UsageError: That variable says none.
    """
    place, owned = suspended_of(home)
    swept = sweep_abandoned(place, owned, retention or retention_from(os.environ), time.time())
    for path in swept.removed:
        log.info("%s: the snapshot of a cluster that is gone has been kept long enough", path)
    return swept
