"""The head as a process: `python -m regrow.head --config FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from regrow.config import HeadConfig
from regrow.errors import RegrowError
from regrow.launchers.joined import JoinedLauncher, worker_secret
from regrow.launchers.leased import LeasedLauncher
from regrow.launchers.local import LocalLauncher
from regrow.supervise import guard_head

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


def _launcher(config: HeadConfig) -> LocalLauncher | LeasedLauncher | JoinedLauncher:
    if config.machines_socket is not None:
        return LeasedLauncher(config.machines_socket)
    local = LocalLauncher(Path(config.log_dir))
    if config.worker_port is None or config.tcp is None:
        return local
    return JoinedLauncher(
        local,
        config.worker_port,
        worker_secret(config.tcp.token),
        slots={
            (index, host)
            for index in range(config.slices)
            for host in range(config.hosts_per_slice)
        },
        wait_s=config.start_deadline_s * _SHARE_OF_START,
    )


raise SystemExit(main())
