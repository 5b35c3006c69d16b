"""Regrow's own client against the local server, and against servers that misbehave."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cloud_server import LocalCloud
from cloud_world import PLACE, node_body, request

from regrow.cloud.client import CloudClient
from regrow.cloud.nodes import being_made
from regrow.cloud.waiting import Deadlines, Progress, dead, given_up_deleted, wait_ready
from regrow.errors import CloudApiError, Code, NoClusterError, WaitTimeout
from waiting import until


@pytest.fixture
def client(simulated: LocalCloud) -> Iterator[CloudClient]:
    client = CloudClient(simulated.directory.server().endpoint)
    yield client
    for one in client.list_queued(PLACE):
        name = one["name"].rpartition("/")[2]
        operation = client.delete_queued(PLACE, name, force=True)
        if operation is not None:
            client.wait(operation, 30)
    client.close()


def test_a_node_that_is_deleted_while_it_is_made_is_told_from_a_zone_that_there_is_not() -> None:
    with pytest.raises(CloudApiError, match="t was deleted while it was made") as error:
        with being_made("t"):
            raise CloudApiError(Code.NOT_FOUND, "Resource 'operation-1' was not found")
    assert error.value.code is Code.ABORTED


class TestWalk:
    def test_queued_resources(self, client: CloudClient) -> None:
        operation = client.create_queued(PLACE, "q", request("v4-16", 2))
        assert client.wait(operation, 30)["name"].endswith("/q")
        told: list[Progress] = []
        wait_ready(client, PLACE, "q", Deadlines(30, 30, 30), tell=told.append)
        assert told[-1] == Progress("done", "ACTIVE", 2, 2)
        assert [one["name"] for one in client.list_nodes(PLACE)]
        client.wait(client.reset_queued(PLACE, "q"), 30)
        with pytest.raises(CloudApiError, match="use force") as refusal:
            client.delete_queued(PLACE, "q")
        assert refusal.value.code is Code.FAILED_PRECONDITION
        deletion = client.delete_queued(PLACE, "q", force=True)
        assert deletion is not None
        client.wait(deletion, 30)
        assert client.delete_queued(PLACE, "q") is None
        with pytest.raises(CloudApiError, match="was not found"):
            client.queued(PLACE, "q")

    def test_nodes(self, client: CloudClient) -> None:
        client.wait(client.create_node(PLACE, "n", node_body("v4-8")), 30)
        assert client.wait(client.stop_node(PLACE, "n"), 30)["state"] == "STOPPED"
        assert client.wait(client.start_node(PLACE, "n"), 30)["state"] == "READY"
        deletion = client.delete_node(PLACE, "n")
        assert deletion is not None
        client.wait(deletion, 30)
        assert client.delete_node(PLACE, "n") is None

    def test_an_operation_that_fails(self, client: CloudClient, simulated: LocalCloud) -> None:
        body = '{"zone":"us-central2-b","generation":"v2","chips":0}'
        simulated.raw("POST", "/regrow/v1/capacity", body)
        with pytest.raises(CloudApiError, match="no more capacity") as failure:
            client.wait(client.create_node(PLACE, "n", node_body("v2-8")), 30)
        assert failure.value.code is Code.RESOURCE_EXHAUSTED


class TestWaiting:
    def test_each_part_has_its_deadline(self, client: CloudClient) -> None:
        later = request(queueingPolicy={"validAfterDuration": "3600s"})
        client.create_queued(PLACE, "q", later)
        with pytest.raises(WaitTimeout, match="capacity for q"):
            wait_ready(client, PLACE, "q", Deadlines(assign_s=0.1))

    def test_ends_when_there_is_no_hope(self, client: CloudClient, simulated: LocalCloud) -> None:
        client.create_queued(PLACE, "q", request(spot={}))
        wait_ready(client, PLACE, "q", Deadlines(30, 30, 30))
        body = json.dumps({"name": PLACE.child("queuedResources", "q")})
        simulated.raw("POST", "/regrow/v1/preempt", body)
        until(lambda: simulated.state_of("q") == "SUSPENDED")
        with pytest.raises(CloudApiError, match="q is SUSPENDED by SERVICE"):
            wait_ready(client, PLACE, "q", Deadlines(30, 30, 30))
        assert dead(client, PLACE) == ["q"]

    def test_a_failed_one_tells_its_own_error(
        self, client: CloudClient, simulated: LocalCloud
    ) -> None:
        body = '{"zone":"us-central2-b","generation":"v2","chips":0}'
        simulated.raw("POST", "/regrow/v1/capacity", body)
        short = {"validUntilDuration": "0.2s"}
        client.create_queued(PLACE, "q", request("v2-8", queueingPolicy=short))
        with pytest.raises(CloudApiError, match="expired before") as failure:
            wait_ready(client, PLACE, "q", Deadlines(30, 30, 30))
        assert failure.value.code is Code.DEADLINE_EXCEEDED

    def test_who_gives_up_deletes(self, client: CloudClient, simulated: LocalCloud) -> None:
        later = request(queueingPolicy={"validAfterDuration": "3600s"})
        client.create_queued(PLACE, "q", later)
        with pytest.raises(WaitTimeout), given_up_deleted(client, PLACE, "q"):
            wait_ready(client, PLACE, "q", Deadlines(assign_s=0.05))
        path = f"/v2/{PLACE.child('queuedResources', 'q')}"
        until(lambda: simulated.raw("GET", path)[0] == 404)


class _Moody(http.server.BaseHTTPRequestHandler):
    answers: list[tuple[int, bytes]]

    def do_GET(self) -> None:
        status, body = self.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def moody() -> Iterator[tuple[CloudClient, list[tuple[int, bytes]]]]:
    """A client of a server that answers what it is told to."""
    answers: list[tuple[int, bytes]] = []
    handler = type("Handler", (_Moody,), {"answers": answers})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        client = CloudClient(f"http://127.0.0.1:{server.server_port}/")
        yield client, answers
        client.close()
        server.shutdown()
        thread.join()


class TestTrouble:
    def test_is_tried_again(self, moody: Any) -> None:
        client, answers = moody
        answers += [(503, b"{}"), (502, b"bad gateway"), (200, b'{"name": "x"}')]
        assert client.queued(PLACE, "q") == {"name": "x"}

    def test_is_told_when_it_stays(self, moody: Any) -> None:
        client, answers = moody
        answers += [(200, b"<html>login</html>")]
        with pytest.raises(CloudApiError, match="which is no API's answer"):
            client.queued(PLACE, "q")

    def test_a_quota_is_not_tried_again(self, moody: Any) -> None:
        client, answers = moody
        body = {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "Limit: 0"}}
        answers += [(429, json.dumps(body).encode())]
        with pytest.raises(CloudApiError, match="RESOURCE_EXHAUSTED: Limit: 0"):
            client.queued(PLACE, "q")

    def test_nobody_there(self) -> None:
        client = CloudClient("http://127.0.0.1:1")
        with pytest.raises(NoClusterError, match="does not answer"):
            client.queued(PLACE, "q")
