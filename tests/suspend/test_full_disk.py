"""Storage that takes no more: nothing is lost, it is said in one line, and the job goes on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from suspend_rig import STEPS, Rig

from regrow.errors import ClusterError

PROGRAM = Path(__file__).with_name("full_disk.py")


@pytest.mark.timeout(300)
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    unshare = ["unshare", "--mount"]
    if os.geteuid():
        unshare.append("--map-root-user")
    (tmp_path / "try").mkdir()
    tried = subprocess.run(
        [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "try")],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        pytest.skip(
            f"nothing can be mounted here ({tried.stderr.strip()}): "
            "test_a_host_whose_files_may_not_grow stands in"
        )
    ran = subprocess.run(
        [*unshare, sys.executable, str(PROGRAM), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr
    told = ran.stdout.split("\n")
    assert "chunks" in told
    assert "manifests" in told


def test_a_host_whose_files_may_not_grow(
    rig: Rig, expected: list[dict[str, str]], tmp_path: Path
) -> None:
    """The limit of a process stands in for the full disk, where no small disk can be made."""
    rig.client.do("begin")
    rig.client.do("steps", count=STEPS)
    place, pid = tmp_path / "place", rig.cluster.slices[1].pids[0]
    limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, limit[1]))
    with pytest.raises(ClusterError, match=r"everything is as it was: .*: File too large$"):
        rig.cluster.suspend(url=str(place))  # Nothing is there that need not be written.
    assert os.listdir(place) == []
    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    assert rig.states() == ["up", "up"]
    rig.cluster.suspend(url=str(place))
    rig.cluster.resume()
    assert rig.client.do("digest") == expected[0]
