"""A local Cloud TPU as its users meet it: the command, and HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cloud_world import PLACE, request

from regrow.cloud.server.state_dir import ServerState, StateDir
from waiting import until

ZONE = PLACE.name


class LocalCloud:
    """One state directory, and the servers that it has one after the other."""

    def __init__(self, path: Path, *options: str) -> None:
        self.directory = StateDir(path)
        self.options = options
        self.process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> ServerState:
        environ = {
            key: value for key, value in os.environ.items() if not key.startswith("REGROW_C")
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "regrow",
                "cloud",
                "up",
                "--port",
                "0",
                "--state-dir",
                str(self.directory.path),
                *self.options,
                *options,
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert " is up at " in line, line + self.process.stderr.read()
        return self.directory.server()

    def kill(self) -> None:
        """The server dies without a word."""
        assert self.process is not None
        self.process.kill()
        self.wait()

    def stop(self) -> str:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> str:
        assert self.process is not None
        _, errors = self.process.communicate(timeout=30)
        self.process = None
        return errors

    # --- HTTP ---

    def raw(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        url = urlsplit(self.directory.server().endpoint)
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(text)
        finally:
            connection.close()

    def call(self, method: str, path: str, body: Any = None, *, version: str = "v2") -> Any:
        """A request that is to work."""
        text = None if body is None else json.dumps(body)
        status, answer = self.raw(method, f"/{version}/{path}", text)
        assert status == 200, answer
        return answer

    def refused(self, method: str, path: str, body: Any = None, *, version: str = "v2") -> Any:
        """A request that is not to work; its error."""
        text = None if body is None else json.dumps(body)
        status, answer = self.raw(method, f"/{version}/{path}", text)
        assert set(answer) == {"error"}, answer
        error = answer["error"]
        assert status == error["code"]
        assert "\n" not in error["message"]
        return error

    # --- shorthands ---

    def create(self, name: str, accelerator: str = "v4-8", slices: int = 1, **fields: Any) -> Any:
        metadata = fields.pop("metadata", None)
        fields.setdefault("node_id", f"{name}-0") if slices == 1 else None
        body = request(accelerator, slices, **fields)
        if metadata:
            body["tpu"]["nodeSpec"][0]["node"]["metadata"] = metadata
        return self.call("POST", f"{ZONE}/queuedResources?queuedResourceId={name}", body)

    def state_of(self, name: str) -> str:
        state: str = self.call("GET", f"{ZONE}/queuedResources/{name}")["state"]["state"]
        return state

    def node(self, name: str) -> Any:
        return self.call("GET", f"{ZONE}/nodes/{name}")

    def active(self, name: str) -> None:
        until(lambda: self.state_of(name) == "ACTIVE")

    def delete(self, name: str) -> None:
        path = f"{ZONE}/queuedResources/{name}"
        self.call("DELETE", f"{path}?force=true")
        until(lambda: self.raw("GET", f"/v2/{path}")[0] == 404)

    def done(self, operation: Any, version: str = "v2") -> Any:
        """The end of an operation."""
        ends: list[Any] = []

        def ended() -> bool:
            ends[:] = [self.call("GET", operation["name"], version=version)]
            return bool(ends[0]["done"])

        until(ended)
        return ends[0]

    # --- hosts ---

    def script_log(self, node: str, worker: int = 0) -> str:
        """What startup scripts of a node have printed, over all its incarnations."""
        paths = self.directory.path.glob(f"logs/*-{node}/worker-{worker}/startup-script.log")
        return "".join(path.read_text() for path in paths)

    def agents(self, node: str) -> list[int]:
        """The processes of a node's hosts."""
        uid = self.node(node)["id"]
        paths: Iterable[Path] = sorted(self.directory.path.glob(f"hosts/{uid}/*/*/agent.json"))
        return [json.loads(path.read_text())["process"]["pid"] for path in paths]
