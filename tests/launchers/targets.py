"""What the tests have host processes do; imported by the template process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def wait(spec):
    print("waits", flush=True)
    time.sleep(60)


def leave(spec):
    sys.exit(spec["status"])


def fail(spec):
    raise RuntimeError("it failed")


def tell(spec):
    """Writes what a test wants to know of the process."""
    answers = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "files": sorted(str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in _open_files()),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "environ": dict(os.environ),
        "spec": {name: repr(value) for name, value in spec.items()},
        "name": Path("/proc/self/comm").read_text().strip(),
    }
    import json

    draft = Path(spec["answer"] + ".draft")
    draft.write_text(json.dumps(answers))
    draft.replace(spec["answer"])


def _open_files():
    with os.scandir("/proc/self/fd") as entries:
        own = [int(entry.name) for entry in entries]
    return [fd for fd in own if fd > 2 and Path(f"/proc/self/fd/{fd}").is_symlink()]


def breed(spec):
    """Starts a child in its own group, and waits."""
    child = subprocess.Popen(["sleep", "60"])
    Path(spec["answer"]).write_text(str(child.pid))
    time.sleep(60)


def kill_template(spec):
    """Ends the template as soon as this process has been forked off it."""
    marker = Path(spec["answer"])
    if not marker.exists():
        marker.touch()
        os.kill(spec["template"], signal.SIGKILL)
    time.sleep(60)
