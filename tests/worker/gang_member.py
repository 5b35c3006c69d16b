"""One member of a gang, as a process: carries out the lines of its standard input, answers each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from worker_rig import HostRig

from regrow.channel import commands as c
from regrow.worker.garbage import collect_aside
from regrow.worker.platform import initialise
from regrow.worker.sockets import sockets

F32 = 11


def shown(answer: Any) -> list[Any]:
    if isinstance(answer, c.Reply):
        return ["value", list(memoryview(answer.value).cast("f")) if answer.value else None]
    return ["error", answer.code, answer.message, answer.epoch]


def main() -> None:
    initialise()
    index = int(sys.argv[1])
    rig = HostRig((index,))
    collect_aside(rig.host.work_done)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("@" + json.dumps(_ACTS[name](rig, index, *arguments)), flush=True)


def form(rig: HostRig, index: int, epoch: int, node: int, members: Any, where: Any) -> Any:
    address, keys = where
    rig.tell(c.FormEpoch(epoch, node, members, address, keys[node]))
    return None


def formed(rig: HostRig, index: int, epoch: int) -> int:
    def find() -> Any:
        return [report.port for report in rig.reports.of(c.EpochFormed) if report.epoch == epoch]

    port: int = rig.reports.wait(find, "the epoch")[0]
    return port


def load(rig: HostRig, index: int, number: int, blob: str, options: str, *more: Any) -> Any:
    devices, outs, epoch = more
    rig.tell(
        c.Load(
            number, "p", bytes.fromhex(blob), b"", bytes.fromhex(options), devices, 1, outs, epoch
        )
    )
    return None


def put(rig: HostRig, index: int, aid: int, values: list[float]) -> Any:
    import numpy as np

    data = np.float32(values)
    shard = c.HostShard(index, 0, data.shape, None)
    rig.tell(c.Put(aid, F32, data.tobytes(), (shard,), "device", True, 0, False))
    return None


def execute(
    rig: HostRig, index: int, launch: int, program: int, args: Any, outs: Any, status: int = 0
) -> Any:
    rig.tell(c.Execute(launch, program, args, outs, status))
    return None


def copy(rig: HostRig, index: int, aid: int, source: int) -> Any:
    rig.tell(c.Copy(aid, [(source, 0)], [index], "pinned_host"))
    return None


def ask_ready(rig: HostRig, index: int, aid: int) -> int:
    return rig.asked(lambda rid: c.Ready(rid, [aid]))


def get(rig: HostRig, index: int, aid: int) -> Any:
    return shown(rig.ask(lambda rid: c.Get(rid, aid, 0, None, None, None)))


def ask(rig: HostRig, index: int, aid: int) -> int:
    return rig.asked(lambda rid: c.Get(rid, aid, 0, None, None, None))


def answer(rig: HostRig, index: int, rid: int) -> Any:
    return shown(rig.reports.answer(rid))


def fail(rig: HostRig, index: int, epoch: int, message: str, ports: Any) -> Any:
    rig.tell(c.FailEpoch(epoch, message, ports), c.Adopt())
    return None


def broken(rig: HostRig, index: int) -> Any:
    return [list(report) for report in rig.reports.of(c.EpochBroken)]


def ports(rig: HostRig, index: int) -> int:
    """How many clients of epochs there are: each listens."""
    return len(sockets(listening=True))


_ACTS = {
    "form": form,
    "formed": formed,
    "load": load,
    "put": put,
    "execute": execute,
    "copy": copy,
    "ask_ready": ask_ready,
    "get": get,
    "ask": ask,
    "answer": answer,
    "fail": fail,
    "broken": broken,
    "ports": ports,
}

if __name__ == "__main__":
    main()
