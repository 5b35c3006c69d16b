"""News of the metadata server: a real HTTP server that speaks as it does."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from regrow.worker import metadata


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = False
        self.changed = threading.Condition()
        self.values = dict(metadata.QUIET)
        self.asked: queue.Queue[str] = queue.Queue()
        self.ending = False

    def change(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.ending = True
            self.changed.notify_all()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key, query = url.path.rpartition("/")[2], parse_qs(url.query)
        assert self.headers["Metadata-Flavor"] == "Google"
        server = self.server
        with server.changed:
            if "wait_for_change" in query:
                (etag,) = query["last_etag"]
                server.asked.put(key)
                server.changed.wait_for(lambda: server.ending or server.values[key] != etag, 20)
            value = server.values[key]
        self.send_response(503 if server.ending else 200)
        self.send_header("ETag", value)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv(metadata.HOST_VARIABLE, f"127.0.0.1:{server.server_port}")
    yield server
    server.end()
    thread.join()


def test_what_changes_is_told_and_what_was_there_before_is_not(server: Server) -> None:
    told: queue.Queue[str] = queue.Queue()
    server.change("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
    assert metadata.watch(told.put)
    assert {server.asked.get(timeout=10), server.asked.get(timeout=10)} == set(metadata.QUIET)
    assert told.empty()
    server.change("preempted", "TRUE")
    assert told.get(timeout=10) == "the metadata server says preempted: TRUE"
    server.change("maintenance-event", "NONE")
    server.change("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    assert told.get(timeout=10).endswith("maintenance-event: TERMINATE_ON_HOST_MAINTENANCE")


def test_without_a_server_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metadata.HOST_VARIABLE, raising=False)
    assert not metadata.watch(print)
