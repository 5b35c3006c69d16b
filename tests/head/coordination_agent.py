"""One agent of XLA's coordination service, as a process: carries out the lines of its standard input."""

from __future__ import annotations

import json
import sys
from typing import Any

from jaxlib import _jax
from jaxlib import xla_client as xc

_NEVER_S = 1_000_000


class Agent:
    """What a line may name."""

    def __init__(self) -> None:
        self._agents: dict[str, Any] = {}

    def connect(self, name: str, address: str, key: int) -> None:
        agent = _jax.get_distributed_runtime_client(
            address,
            key,
            init_timeout=_NEVER_S,
            heartbeat_timeout=_NEVER_S,
            shutdown_timeout=_NEVER_S,
            shutdown_on_destruction=False,
            use_compression=False,
        )
        agent.connect()
        self._agents[name] = agent

    def connect_beating(self, name: str, address: str, key: int) -> None:
        """One with heartbeats each second, that tells when it leaves."""
        agent = _jax.get_distributed_runtime_client(
            address, key, init_timeout=5, heartbeat_timeout=2, shutdown_timeout=5
        )
        agent.connect()
        self._agents[name] = agent

    def form(self, name: str, node: int, nodes: int) -> int:
        agent = self._agents[name]
        client = xc.make_cpu_client(
            asynchronous=True,
            distributed_client=agent,
            node_id=node,
            num_nodes=nodes,
            collectives=_jax.make_gloo_tcp_collectives(agent, hostname="127.0.0.1"),
            num_devices=2,
            get_local_topology_timeout_minutes=1,
            get_global_topology_timeout_minutes=1,
        )
        return len(client.devices())

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        return getattr(self._agents[name], method)(*arguments)


def main() -> None:
    agent = Agent()
    for line in sys.stdin:
        act, *arguments = json.loads(line)
        try:
            answer = ["value", getattr(agent, act)(*arguments)]
        except Exception as error:
            answer = ["error", str(error)]
        print("@" + json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    main()
