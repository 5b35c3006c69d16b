"""`python -m regrow`."""

import sys

from regrow.cli import main

if __name__ == "__main__":
    sys.exit(main())
