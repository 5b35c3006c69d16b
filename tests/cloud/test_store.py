from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cloud_world import PLACE, World

from regrow.cloud.machine import ControlPlane
from regrow.cloud.store import Store
from regrow.errors import ClusterError


def test_keeps_everything(tmp_path: Path) -> None:
    world = World()
    with Store(tmp_path / "db") as store:
        world.plane.queued.create(
            PLACE, "q", {"spot": {}, "tpu": {"nodeSpec": [_spec()]}}, world.now, request_id="r"
        )
        store.write(world.plane.take_changes(), block=7)
        world.plane.tick(world.now + 1)
        world.plane.tick(world.now + 2)
        store.write(world.plane.take_changes())
    assert (tmp_path / "db").stat().st_mode & 0o777 == 0o600
    with Store(tmp_path / "db") as store:
        plane = ControlPlane(world.config, store.load())
        assert store.fact("block") == 7
        assert store.fact("other", "no") == "no"
    again = plane.queued.get(PLACE.child("queuedResources", "q"))
    assert again.tier.preemptible
    assert again.state == "PROVISIONING"
    repeated = plane.queued.create(PLACE, "q", {}, world.now, request_id="r")
    assert repeated.name in plane.tables.operations


def _spec() -> dict:
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-vm-base"}
    return {"parent": PLACE.name, "nodeId": "n", "node": node}


_WRITER = """
    import sys
    from pathlib import Path
    from cloud_world import PLACE, World
    from regrow.cloud.store import Store

    world = World()
    with Store(Path(sys.argv[1])) as store:
        for number in range(100000):
            world.now += 0.001
            node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-vm-base"}
            operation = world.plane.nodes.create(PLACE, f"n{number % 7}", node, world.now)
            changes = world.plane.take_changes()
            store.write(changes, done=number)
            print(number, operation.name, flush=True)
            world.plane.nodes.delete(operation.target, world.now)
            world.plane.tick(world.now + 1)
            for one in list(world.plane.tables.nodes.values()):
                world.plane.tables.remove(one)
            store.write(world.plane.take_changes())
"""


def test_a_kill_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    for lines in (1, 7, 40):
        path = tmp_path / f"db{lines}"
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_WRITER), str(path)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with writer:
            assert writer.stdout is not None
            answered = [writer.stdout.readline().split() for _ in range(lines)]
            writer.send_signal(signal.SIGKILL)
            answered += [line.split() for line in writer.stdout if line.endswith("\n")]
        with Store(path) as store:
            operations = {record.name for record in store.load()}
            assert store.fact("done") >= int(answered[-1][0])
        assert {name for _, name in answered} <= operations


def test_refuses_another_format(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ClusterError, match="another release"):
        Store(tmp_path / "db")
    (tmp_path / "text").write_text("no database" * 100)
    with pytest.raises(ClusterError, match="cannot open"):
        Store(tmp_path / "text")
