"""The resource manager as a process: `python -m regrow.jobs DIRECTORY`.

It keeps its state in DIRECTORY and listens on DIRECTORY/jobs.sock. It ends on SIGTERM or SIGINT, and
the next one goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from regrow.errors import RegrowError, UsageError
from regrow.jobs.model import Policy
from regrow.jobs.priorities import PriorityClasses, load_classes
from regrow.jobs.service import Service
from regrow.jobs.store import Store
from regrow.processes import close_inherited, die_with_parent


def main() -> int:
    """Runs it; returns the exit status."""
    options = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        if options.parent is not None:
            close_inherited(())
            die_with_parent(options.parent)
        policy = Policy(
            spares=options.spares,
            grace_s=options.grace_s,
            fence_s=options.fence_s,
            report_s=options.report_s,
        )
        file = options.priorities
        classes = PriorityClasses() if file is None else load_classes(Path(file))
        return asyncio.run(_run(Path(options.directory), policy, classes))
    except RegrowError as error:
        sys.stderr.write(f"regrow: {error}\n")
        return 2 if isinstance(error, UsageError) else 3


async def _run(directory: Path, policy: Policy, classes: PriorityClasses) -> int:
    store = Store(directory)
    service = Service(store, policy, classes)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.ended.set)
    try:
        await service.start()
        await service.ended.wait()
    finally:
        service.close()
        store.close()
    if service.error is not None:
        raise service.error
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = Policy()
    parser = argparse.ArgumentParser(prog="python -m regrow.jobs")
    parser.add_argument("directory")
    parser.add_argument("--priorities", metavar="FILE")
    parser.add_argument("--spares", type=int, default=defaults.spares)
    parser.add_argument("--parent", type=int, metavar="PID", help="It ends with this process.")
    for name in ("grace", "fence", "report"):
        key = f"{name}_s"
        parser.add_argument(f"--{name}", dest=key, type=float, default=getattr(defaults, key))
    return parser


if __name__ == "__main__":
    sys.exit(main())
