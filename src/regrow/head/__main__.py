"""The head as a process: `python -m regrow.head --config FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from regrow.config import HeadConfig
from regrow.errors import RegrowError
from regrow.launchers.leased import LeasedLauncher
from regrow.launchers.local import LocalLauncher
from regrow.supervise import guard_head

_CANNOT_START = 3


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


def _launcher(config: HeadConfig) -> LocalLauncher | LeasedLauncher:
    if config.machines_socket is not None:
        return LeasedLauncher(config.machines_socket)
    return LocalLauncher(Path(config.log_dir))


raise SystemExit(main())
