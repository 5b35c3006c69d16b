"""`regrow`, and `python -m regrow`."""

from __future__ import annotations

import sys

_INTERRUPTED_STATUS = 130


def main() -> int:
    """Runs the command line; returns the exit status."""
    try:
        # It takes long enough to be interrupted.
        from regrow import cli
    except KeyboardInterrupt:
        return _INTERRUPTED_STATUS
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
