"""The head as a process: `python -m regrow.head --config FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from regrow.config import HeadConfig
from regrow.errors import RegrowError
from regrow.launchers.joined import JoinedLauncher, worker_secret
from regrow.launchers.leased import LeasedLauncher
from regrow.launchers.local import LocalLauncher
from regrow.supervise import guard_head

if TYPE_CHECKING:
    from regrow.head.main import HeadLauncher

_CANNOT_START = 3
# A host that joins late has to have the time to come up.
_SHARE_OF_START = 0.8


def main() -> int:
    """Runs a head in the foreground; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m regrow.head", description=__doc__)
    parser.add_argument("--config", required=True, help="JSON file of a HeadConfig")
    try:
        config = HeadConfig.load(parser.parse_args().config)
        guard_head(config)
        # The template takes longest to start: it imports JAX while we import the rest of the head.
        launcher = _launcher(config)
        from regrow.head.main import serve_head

        serve_head(config, launcher)
    except RegrowError as error:
        sys.stderr.write(f"regrow: {error}\n")
        return _CANNOT_START
    return 0


def _launcher(config: HeadConfig) -> HeadLauncher:
    log_dir = Path(config.log_dir)
    if config.machines_socket is not None:
        return LeasedLauncher(config.machines_socket)
    if config.tpu is not None:
        from regrow.launchers.cloud_tpu import CloudTpuLauncher

        return CloudTpuLauncher(config.tpu, log_dir, start_deadline_s=config.start_deadline_s)
    if config.ray is not None:
        from regrow.ray.launcher import RayLauncher

        return RayLauncher(
            config.ray,
            log_dir,
            hosts_per_slice=config.hosts_per_slice,
            start_deadline_s=config.start_deadline_s,
        )
    local = LocalLauncher(log_dir)
    if config.worker_port is None or config.tcp is None:
        return local
    return _joined(local, config, config.worker_port, config.tcp.token)


def _joined(
    local: LocalLauncher, config: HeadConfig, port: int, token: str | None
) -> JoinedLauncher:
    slots = {
        (index, host) for index in range(config.slices) for host in range(config.hosts_per_slice)
    }
    wait_s = config.start_deadline_s * _SHARE_OF_START
    return JoinedLauncher(local, port, worker_secret(token), slots=slots, wait_s=wait_s)


raise SystemExit(main())
