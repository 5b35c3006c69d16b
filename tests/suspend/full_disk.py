"""A job that is suspended to a disk with ever more room, until it has enough.

    unshare --mount [--map-root-user] python full_disk.py DIRECTORY

Runs in a mount namespace of its own, for the disk is a small file system that it mounts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from suspend_rig import STEPS, Rig

from regrow.errors import ClusterError
from regrow.suspend import Manifest, Snapshots, open_storage
from regrow.suspend.export import verify
from regrow.suspend.snapshots import CHUNKS, MANIFESTS

DISK_BYTES = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


def fill(disk: Path, but: int) -> None:
    """Leaves so many pages of a disk free."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    free = os.statvfs(disk).f_bavail
    filler.write_bytes(bytes(max(free - but, 0) * PAGE))


def check_store(store: Snapshots, latest: Manifest) -> None:
    """The latest snapshot is whole, and nothing else takes room."""
    assert store.read() == latest
    verify(store, latest)
    needed = {chunk for number in store.numbers() for chunk in store.read(number).chunks()}
    assert set(store.storage.names(CHUNKS)) == needed
    assert len(store.storage.names(MANIFESTS)) == len(store.numbers())


def refused(rig: Rig) -> str | None:
    """Suspends; what it says if it cannot be done."""
    try:
        rig.cluster.suspend()
    except ClusterError as error:
        return str(error)
    return None


def run(directory: Path) -> list[str]:
    """Returns the folders that had no room, one for each time."""
    disk = directory / "disk"
    disk.mkdir()
    options = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=True)
    with Rig(directory / "home", gcs_scratch_location=str(disk)) as rig:
        rig.client.do("steps", count=STEPS)
        store = Snapshots(open_storage(rig.cluster.suspend()["url"]))
        rig.cluster.resume()
        before, room, full, again = store.read(), 0, [], 0
        rig.client.do("steps", count=1)
        while True:
            fill(disk, room)
            error = refused(rig)
            if error is None:
                assert store.read().number == before.number + 1
                if MANIFESTS in full:
                    break
                # Hosts that wrote the same at once had needed more room the time before.
                rig.cluster.resume()
                before, room, again = store.read(), 0, again + 1
                rig.client.do("steps", count=1)
                continue
            assert error.startswith("slices 0, 1 not suspended, everything is as it was: "), error
            assert error.endswith(": No space left on device"), error
            assert "\n" not in error
            assert rig.states() == ["up", "up"]
            check_store(store, before)
            rig.client.do("steps", count=1)
            full.append(CHUNKS if f"/{CHUNKS}/" in error else MANIFESTS)
            room += 1  # A manifest may be as small as a page.
        rig.cluster.resume()
        found = rig.client.do("digest")
        rig.client.do("begin")
        rig.client.do("steps", count=STEPS + 1 + len(full) + again)
        assert rig.client.do("digest") == found
    return full


if __name__ == "__main__":
    print("\n".join(run(Path(sys.argv[1]))))
