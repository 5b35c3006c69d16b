"""The head as a process: `python -m regrow.head --config FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from regrow.config import HeadConfig
from regrow.errors import RegrowError
from regrow.launchers.local import LocalLauncher
from regrow.supervise import guard_head

if TYPE_CHECKING:
    from regrow.launchers.cloud_tpu import CloudTpuLauncher
    from regrow.ray.launcher import RayLauncher

_CANNOT_START = 3


def _launcher(config: HeadConfig) -> LocalLauncher | CloudTpuLauncher | RayLauncher:
    log_dir = Path(config.log_dir)
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
    return LocalLauncher(log_dir)


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


raise SystemExit(main())
