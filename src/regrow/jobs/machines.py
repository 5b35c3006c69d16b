"""The machines of a shared cluster as a process: `python -m regrow.jobs.machines --config FILE`.

It owns the slices' processes. The resource manager tells it what to end (`Fence`) and hears from it
when that is done; the heads of jobs ask it, on DIRECTORY/machines.sock, to start their hosts where they
have a lease. What a head has started ends with its connection. A spare is warm: each of its hosts is
there already, with its libraries imported and its devices made, and waits for a head to go to.

| method | params | who |
|---|---|---|
| start | entry, spec, name; index, incarnation, host: of the lease; or label: no host of a slice | a head |
| signal | number, signal | a head |
| warm | key | a host that waits |
| kill, stop, cont | index | an operator |
| status | | an operator |

A head hears of the end of what it has started by events `{number, cause}`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path
from typing import Any, Final, final

from regrow.config import HeadConfig
from regrow.control_aio import LineClient, LineServer, Peer
from regrow.errors import ControlError, NoClusterError, RegrowError, UsageError
from regrow.jobs.model import Shape
from regrow.jobs.places import Place
from regrow.jobs.service import SOCKET_NAME as MANAGER_SOCKET
from regrow.jobs.warmth import Warmth
from regrow.launchers.leased import unpack_spec
from regrow.launchers.local import LocalLauncher, LocalProcess
from regrow.supervise import guard_head

logger = logging.getLogger(__name__)

SOCKET_NAME: Final = "machines.sock"
_RETRY_S: Final = 0.05
_ANSWER_S: Final = 30.0
_MAX_PEERS: Final = 1024
_ENTRIES: Final = frozenset({"regrow.worker.main:run", "regrow.worker.main:run_compiler"})
_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "cont": signal.SIGCONT,
}


@final
class _Run:
    """A process that a head has started."""

    def __init__(self, number: int, owner: Peer, place: Place | None, ticket: int) -> None:
        self.number = number
        self.owner = owner
        self.place = place
        self.ticket = ticket
        self.process: LocalProcess | None = None
        self.unwanted = False

    def kill(self) -> None:
        """Ends it, now or when it has come to life."""
        self.unwanted = True
        if self.process is not None:
            self.process.kill()


@final
class Machines:
    """All slices of a shared cluster."""

    def __init__(self, config: HeadConfig, launcher: LocalLauncher, *, warm: bool) -> None:
        self._config = config
        self._launcher = launcher
        self._places = [Place(index) for index in range(config.slices)]
        self._runs: dict[int, _Run] = {}
        self._last = 0
        directory = Path(config.socket_dir)
        self._manager_path = directory / MANAGER_SOCKET
        path = directory / SOCKET_NAME
        self._server = LineServer(path, self._do, gone=self._gone, connections=_MAX_PEERS)
        self._manager: LineClient | None = None
        self._manager_gone = asyncio.Event()
        self._warmth = Warmth(
            launcher,
            str(path),
            config.devices_per_slice // config.hosts_per_slice,
            config.log_level,
            config.hosts_per_slice if warm else 0,
        )
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """Serves until the end is asked for."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.ended.set)
        await self._server.start()
        told = loop.create_task(self._stay_connected())
        try:
            await self.ended.wait()
        finally:
            told.cancel()
            self._warmth.close()
            await self._server.close()
            await self._launcher.close()

    # --- the manager ---

    async def _stay_connected(self) -> None:
        """Tells each manager, one after the other, what there is."""
        while True:
            self._manager_gone.clear()
            with contextlib.suppress(ControlError, NoClusterError):
                self._manager = await LineClient.connect(
                    self._manager_path, self._on_fence, self._manager_gone.set
                )
                for place in self._places:
                    await self._report(place)
                await self._manager_gone.wait()
            self._manager = None
            await asyncio.sleep(_RETRY_S)

    async def _report(self, place: Place) -> None:
        assert self._manager is not None
        config = self._config
        shape = {"hosts": config.hosts_per_slice, "devices": config.devices_per_slice}
        await self._manager.call(
            "slice",
            timeout_s=_ANSWER_S,
            index=place.index,
            shape={"platform": Shape().platform} | shape,
            running=place.running,
        )

    def _on_fence(self, instruction: dict[str, Any]) -> None:
        place = self._places[instruction["index"]]
        tickets = set(place.fence(instruction["incarnation"]))
        for run in self._runs.values():
            if run.place is place and run.ticket in tickets:
                run.kill()
        self._tell_idle(place)

    def _tell_idle(self, place: Place) -> None:
        upto = place.take_idle()
        if upto is None:
            return
        self._warmth.prepare(place.index)
        if self._manager is not None:
            event = {"kind": "SliceIdle", "index": place.index, "incarnation": upto}
            self._manager.send("tell", event=event)

    # --- heads and operators ---

    def _do(self, peer: Peer, method: str, params: dict[str, Any]) -> Any:
        match method:
            case "start":
                return self._start(peer, params)
            case "signal":
                run = self._runs.get(params.get("number", 0))
                if run is not None and run.owner is peer and run.process is not None:
                    run.process.obey(signal.Signals(params["signal"]))
                return None
            case "warm":
                return self._warmth.arrived(str(params.get("key")), peer)
            case "status":
                return {
                    "slices": [
                        {"index": place.index, "running": place.running, "fenced": place.fenced}
                        for place in self._places
                    ]
                }
            case "kill" | "stop" | "cont":
                return self._act(params.get("index"), _SIGNALS[method])
            case _:
                raise UsageError(f"the machines have no method {method!r}")

    def _gone(self, peer: Peer) -> None:
        self._warmth.gone(peer)
        for run in self._runs.values():
            if run.owner is peer:
                run.kill()

    def _act(self, index: object, signum: signal.Signals) -> None:
        found = [
            run.process
            for run in self._runs.values()
            if run.place is self._place(index) and run.process is not None
        ]
        if not found:
            raise ControlError(f"slice {index} has no processes: no job uses it")
        for process in found:
            process.obey(signum)

    def _place(self, index: object) -> Place:
        if type(index) is not int or not 0 <= index < len(self._places):
            raise UsageError(f"there is no slice {index}; the cluster has {len(self._places)}")
        return self._places[index]

    async def _start(self, peer: Peer, params: dict[str, Any]) -> dict[str, int]:
        entry = params.get("entry")
        if entry not in _ENTRIES:
            raise UsageError(f"{entry!r} is nothing that the machines start")
        self._last += 1
        place, ticket = None, 0
        if "index" in params:
            place = self._place(params["index"])
            ticket = place.begin(params["incarnation"])
        run = self._runs[self._last] = _Run(self._last, peer, place, ticket)
        try:
            process = await self._make(run, params)
        except BaseException:
            # Also where the head has gone meanwhile: what was being made is killed when it is there.
            self._forget(run)
            raise
        run.process = process
        process.on_exit(lambda cause: self._exited(run, cause))
        if run.unwanted or (place is not None and place.is_fenced(ticket)):
            process.kill()
        return {"number": run.number, "pid": process.pid}

    async def _make(self, run: _Run, params: dict[str, Any]) -> LocalProcess:
        spec, name = unpack_spec(params["spec"]), str(params["name"])
        if run.place is None:
            label = str(params["label"])
            return await self._launcher.start_entry(params["entry"], spec, label, name)
        host = int(params["host"])
        warm = self._warmth.take(run.place.index, host, spec)
        if warm is not None:
            return warm
        label = f"slice{run.place.index}-host{host}"
        return await self._launcher.start_entry(params["entry"], spec, label, name)

    def _exited(self, run: _Run, cause: str) -> None:
        run.owner.tell({"number": run.number, "cause": cause})
        self._forget(run)

    def _forget(self, run: _Run) -> None:
        self._runs.pop(run.number, None)
        if run.place is not None:
            run.place.ended(run.ticket)
            self._tell_idle(run.place)


def main() -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m regrow.jobs.machines")
    parser.add_argument("--config", required=True)
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = HeadConfig.load(options.config)
        guard_head(config, "regrow-machines")
        launcher = LocalLauncher(Path(config.log_dir))

        async def run() -> None:
            await Machines(config, launcher, warm=not options.cold).run()

        asyncio.run(run())
    except RegrowError as error:
        sys.stderr.write(f"regrow: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
