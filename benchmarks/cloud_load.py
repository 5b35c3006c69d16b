"""Load on the local Cloud TPU: 256 slices of simulated hosts, and requests at a steady rate.

    python benchmarks/cloud_load.py [--slices 256] [--rate 50] [--seconds 60]

Requests are sent at their times, whether former ones have been answered or not; a latency counts from
the time at which its request was due, so that a server that lags cannot hide it. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import harness

PLACE = "projects/load/locations/us-central2-b"
CONFIG = """
queued_resources_quota = 1000
on_demand_quota = { v4 = 8192 }
[zones.us-central2-b]
v4 = 8192
"""
CONNECTIONS = 64
DEADLINE_S = 60.0


class Api:
    """Sends requests over a pool of connections."""

    def __init__(self, endpoint: str) -> None:
        url = urlsplit(endpoint)
        self._address = (url.hostname, url.port)
        self._free: asyncio.LifoQueue = asyncio.LifoQueue()
        for _ in range(CONNECTIONS):
            self._free.put_nowait([])
        self.latencies_s: dict[str, list[float]] = defaultdict(list)
        self.errors: dict[str, int] = defaultdict(int)

    async def call(self, kind: str, method: str, path: str, body: object = None) -> dict:
        """Sends a request that is due now; its latency is kept under its kind."""
        due = time.monotonic()
        connection = await self._free.get()
        try:
            status, answer = await self._send(connection, method, path, body)
        finally:
            self._free.put_nowait(connection)
        self.latencies_s[kind].append(time.monotonic() - due)
        if status != 200:
            self.errors[f"{kind}: {answer['error']['status']}"] += 1
        return answer

    async def _send(self, connection: list, method: str, path: str, body: object):
        """Sends a request; the server may have closed a connection that was idle for seconds."""
        for is_last in (not connection, True):
            if not connection:
                connection[:] = await asyncio.open_connection(*self._address)
            exchange = self._exchange(connection, method, path, body)
            try:
                return await asyncio.wait_for(exchange, DEADLINE_S)
            except (ConnectionError, asyncio.IncompleteReadError):
                connection.clear()
                if is_last:
                    raise
        raise AssertionError

    async def _exchange(self, connection, method: str, path: str, body: object):
        reader, writer = connection
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} /v2/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        length = next(
            int(line.split(":")[1]) for line in lines if line.startswith("content-length")
        )
        return int(lines[0].split()[1]), json.loads(await reader.readexactly(length))


def request(slices: int) -> dict:
    node = {"acceleratorType": "v4-8", "runtimeVersion": "tpu-ubuntu2204-base"}
    spec = {"parent": PLACE, "node": node, "multisliceParams": {"nodeCount": slices}}
    return {"tpu": {"nodeSpec": [spec]}}


class Load:
    """A mix of requests as clients of a busy project send them."""

    def __init__(self, api: Api, slices: int) -> None:
        self._api = api
        self._slices = slices
        self._random = random.Random(1)
        self._live: list[str] = []
        self._made = 0
        self._kinds: list[tuple[float, Callable[[], Awaitable[object]]]] = [
            (0.55, self._get_node),
            (0.20, self._get_small),
            (0.05, self._get_large),
            (0.05, self._list),
            (0.03, self._list_nodes),
            (0.06, self._create),
            (0.06, self._delete),
        ]

    def one(self) -> Awaitable[object]:
        """The next request."""
        weights = [weight for weight, _ in self._kinds]
        return self._random.choices([kind for _, kind in self._kinds], weights)[0]()

    def _get_node(self):
        number = self._random.randrange(self._slices)
        return self._api.call("get a node", "GET", f"{PLACE}/nodes/big-{number}")

    def _get_small(self):
        if not self._live:
            return self._create()
        # One of the newest: the oldest are deleted meanwhile.
        name = self._random.choice(self._live[-10:])
        return self._api.call("get one of 2 slices", "GET", f"{PLACE}/queuedResources/{name}")

    def _get_large(self):
        kind = f"get one of {self._slices} slices"
        return self._api.call(kind, "GET", f"{PLACE}/queuedResources/big")

    def _list(self):
        return self._api.call("list queued resources", "GET", f"{PLACE}/queuedResources")

    def _list_nodes(self):
        return self._api.call("list nodes", "GET", f"{PLACE}/nodes?pageSize=100")

    async def _create(self):
        self._made += 1
        name = f"small-{self._made}"
        path = f"{PLACE}/queuedResources?queuedResourceId={name}"
        await self._api.call("create one of 2 slices", "POST", path, request(2))
        self._live.append(name)

    async def _delete(self):
        if self._live:
            name = self._live.pop(0)
            path = f"{PLACE}/queuedResources/{name}?force=true"
            await self._api.call("delete one of 2 slices", "DELETE", path)


async def active(api: Api, name: str) -> float:
    """Waits until a queued resource is ACTIVE; returns how long it took, in seconds."""
    began_at = time.monotonic()
    while True:
        answer = await api.call("", "GET", f"{PLACE}/queuedResources/{name}?fields=state")
        if answer["state"]["state"] == "ACTIVE":
            return time.monotonic() - began_at
        await asyncio.sleep(0.01)


async def load(endpoint: str, slices: int, rate: float, duration_s: float, pid: int) -> None:
    api = Api(endpoint)
    path = f"{PLACE}/queuedResources?queuedResourceId=big"
    await api.call("", "POST", path, request(slices))
    print(f"\n{slices} slices are ACTIVE {await active(api, 'big'):.2f} s after their request")
    del api.latencies_s[""]
    mix, tasks = Load(api, slices), []
    began_at, cpu_before_s = time.monotonic(), cpu_s(pid)
    for number in range(int(rate * duration_s)):
        await asyncio.sleep(max(0.0, began_at + number / rate - time.monotonic()))
        tasks.append(asyncio.ensure_future(mix.one()))
    await asyncio.gather(*tasks)
    took_s = time.monotonic() - began_at
    report(api, rate, took_s)
    each_ms = 1000 * (cpu_s(pid) - cpu_before_s) / len(tasks)
    print(f"\nCPU time of the server: {each_ms:.2f} ms a request")


def report(api: Api, rate: float, took_s: float) -> None:
    rows = []
    everything = [one for several in api.latencies_s.values() for one in several]
    for kind, latencies in [*sorted(api.latencies_s.items()), ("all", everything)]:
        cuts = statistics.quantiles(latencies, n=100, method="inclusive")
        figures = (cuts[49], cuts[94], cuts[98], max(latencies))
        rows.append([kind, str(len(latencies)), *(f"{1000 * one:.1f}" for one in figures)])
    print(f"\n{len(everything)} requests at {rate:g} a second, answered in {took_s:.1f} s\n")
    print(harness.table(["request", "number", "median (ms)", "95 %", "99 %", "longest"], rows))
    for text, number in api.errors.items():
        print(f"refused {number} times: {text}")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, default=256)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "cloud.toml")
        config.write_text(CONFIG)
        state = Path(directory, "state")
        argv = [sys.executable, "-m", "regrow", "cloud", "up", "--simulate", "--port", "0"]
        argv += ["--state-dir", str(state), "--config", str(config)]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
            line = server.stderr.readline()
            endpoint = line.partition(" is up at ")[2].split()[0]
            try:
                work = (options.slices, options.rate, options.seconds, server.pid)
                asyncio.run(load(endpoint, *work))
            finally:
                server.terminate()
                server.communicate(timeout=60)


if __name__ == "__main__":
    main()
