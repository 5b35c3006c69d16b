"""The metadata server of a host, at /computeMetadata/v1/ on the host's own address."""

from __future__ import annotations

import hashlib
import http.server
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, final

from regrow.cloud.hosts.metadata import Tree, listing, lookup

_ROOT: Final = "/computeMetadata/v1"
_GUEST: Final = "/computeMetadata/v1/instance/guest-attributes"
_LONGEST_WAIT_S: Final = 3600.0
_LARGEST_VALUE_BYTES: Final = 256 << 10


@final
class MetadataServer:
    """Serves a tree of values, which may be replaced while it runs.

    Attributes:
        guest_attributes: What the guest has written, by namespace and key.
    """

    def __init__(
        self,
        address: tuple[str, int],
        tree: Tree,
        guest_attributes: dict[str, dict[str, str]],
        on_write: Callable[[], None],
    ) -> None:
        """Listens.

        Args:
            address: Where.
            tree: What it tells.
            guest_attributes: What the guest had written before.
            on_write: Is called, by any thread, when the guest has written.

        Raises:
            OSError: If the address is taken.
        """
        self._tree = tree
        self._changed = threading.Condition()
        self._on_write = on_write
        self.guest_attributes = guest_attributes
        self._server = _Server(address, lambda *args: _Handler(self, *args))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def replace(self, tree: Tree) -> None:
        """Tells something else from now on."""
        with self._changed:
            self._tree = tree
            self._changed.notify_all()

    def value(self, path: str) -> Any:
        """What is at a path below the root; KeyError if there is nothing."""
        with self._changed:
            return lookup(self._tree, path)

    def wait_for_change(self, path: str, etag: str | None, timeout_s: float) -> Any:
        """What is at a path once it differs from `etag` (or from now), or after a while."""
        deadline = time.monotonic() + min(timeout_s, _LONGEST_WAIT_S)
        with self._changed:
            known = etag or etag_of(lookup(self._tree, path))
            while etag_of(lookup(self._tree, path)) == known:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return lookup(self._tree, path)

    def write(self, namespace: str, key: str, value: str | None) -> None:
        """Sets or (with None) removes a guest attribute."""
        with self._changed:
            entries = self.guest_attributes.setdefault(namespace, {})
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value
        self._on_write()


def etag_of(value: Any) -> str:
    """Names a value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    # A host that is started again takes the address of connections that are dying still.
    allow_reuse_address = True

    def server_bind(self) -> None:
        # That of http.server looks up the name of the address, which may take long.
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = str(self.server_address[0]), 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "Metadata Server for VM"
    sys_version = ""

    def __init__(self, owner: MetadataServer, *args: Any) -> None:
        self._owner = owner
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - of the base class
        """Nothing is logged."""

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if path in ("", "/"):
            self._reply(HTTPStatus.OK, "computeMetadata/\n")
        elif self._is_allowed():
            self._answer(path, query)

    def _is_allowed(self) -> bool:
        # As the real one: no web page can send this header, and no proxy passes requests on.
        flavor = self.headers.get("Metadata-Flavor", "")
        if flavor == "Google" and "X-Forwarded-For" not in self.headers:
            return True
        self._reply(HTTPStatus.FORBIDDEN, "Missing Metadata-Flavor:Google header.\n")
        return False

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        try:
            if path.startswith(_GUEST):
                value = lookup(self._owner.guest_attributes, path.removeprefix(_GUEST))
            elif not path.startswith(_ROOT):
                raise KeyError(path)
            elif query.get("wait_for_change", "").lower() == "true":
                value = self._owner.wait_for_change(
                    path.removeprefix(_ROOT),
                    query.get("last_etag"),
                    float(query.get("timeout_sec", _LONGEST_WAIT_S)),
                )
            else:
                value = self._owner.value(path.removeprefix(_ROOT))
        except (KeyError, ValueError):
            self._reply(HTTPStatus.NOT_FOUND, "Not Found\n")
            return
        etag = etag_of(value)
        if not isinstance(value, Mapping):
            self._reply(HTTPStatus.OK, str(value), etag=etag)
        elif query.get("recursive", "").lower() == "true":
            text = json.dumps(value)
            self._reply(HTTPStatus.OK, text, kind="application/json", etag=etag)
        else:
            self._reply(HTTPStatus.OK, listing(value), etag=etag)

    def do_PUT(self) -> None:
        length = int(self.headers.get("Content-Length", "0") or "0")
        if length > _LARGEST_VALUE_BYTES:
            self.close_connection = True
            self._reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "Too large\n")
            return
        value = self.rfile.read(length).decode(errors="replace")
        self._write(value)

    def do_DELETE(self) -> None:
        self._write(None)

    def _write(self, value: str | None) -> None:
        if not self._is_allowed():
            return
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        parts = path.removeprefix(_GUEST).strip("/").split("/")
        if not path.startswith(_GUEST) or len(parts) != 2 or not all(parts):
            self._reply(HTTPStatus.NOT_FOUND, "Not Found\n")
            return
        self._owner.write(parts[0], parts[1], value)
        self._reply(HTTPStatus.OK, "")

    def _reply(
        self, status: HTTPStatus, text: str, *, kind: str = "application/text", etag: str = ""
    ) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(body)
