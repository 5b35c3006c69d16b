"""A module whose first import stands still."""

import os
import signal
from pathlib import Path

_mark = Path(os.environ["HESITANT_MARK"])
if not _mark.exists():
    _mark.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
