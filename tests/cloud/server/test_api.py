"""Every method of the API over plain HTTP, and every trap of its wire format."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from cloud_server import ZONE, LocalCloud
from cloud_world import node_body, request

from waiting import until

QUEUED = f"{ZONE}/queuedResources"
NODES = f"{ZONE}/nodes"
PAGE = "projects/your-project-id/locations/us-central2-b"
# The page's own request, with the comma that it lacks.
PAGE_REQUEST = """{
"guaranteed": { "reserved": true },
"tpu": {
    "node_spec": [
    {
    "parent": "projects/123456789/locations/us-central2-b",
        "node": {
        "accelerator_type": "v4-16",
        "runtime_version": "tpu-ubuntu2204-base",
        "network_config": {
            "network": "your-network-name",
            "subnetwork": "your-subnetwork-name",
            "enable_external_ips": true
        },
        "tags" : ["example-tag-1"],
        "metadata": {
            "startup-script": "#! /bin/bash \\n pwd"
        }
    },
    "multi_node_params": {
        "node_count": 4,
        "node_id_prefix": "your-queued-resource-id"
    }
    }
    ]
}
}"""


@pytest.fixture
def api(simulated: LocalCloud) -> LocalCloud:
    yield simulated
    for one in simulated.call("GET", f"{QUEUED}?pageSize=1000").get("queuedResources", []):
        simulated.delete(one["name"].rpartition("/")[2])
    for one in simulated.call("GET", NODES).get("nodes", []):
        simulated.done(simulated.call("DELETE", one["name"]))


class TestThePage:
    """The curl requests of the Multislice page, with another host."""

    def curl(self, api: LocalCloud, method: str, path: str, *options: str) -> Any:
        endpoint = api.directory.server().endpoint
        told = subprocess.run(
            [
                "curl",
                "-sS",
                "-X",
                method,
                "-H",
                "Authorization: Bearer nonsense",
                "-H",
                "Content-Type: application/json",
                *options,
                f"{endpoint}/{path}",
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return json.loads(told.stdout)

    def test_create_get_and_delete(self, api: LocalCloud) -> None:
        name = f"{PAGE}/queuedResources/YOUR_QR_ID"
        path = f"v2alpha1/{PAGE}/queuedResources?queued_resource_id=YOUR_QR_ID"
        operation = self.curl(api, "POST", path, "-d", PAGE_REQUEST)
        assert operation["name"].startswith(f"{PAGE}/operations/operation-")
        metadata = operation.pop("metadata")
        assert operation == {"name": operation["name"], "done": False}
        assert metadata.pop("createTime").endswith("Z")
        assert metadata == {
            "@type": "type.googleapis.com/google.cloud.common.OperationMetadata",
            "target": name,
            "verb": "create",
            "cancelRequested": False,
            "apiVersion": "v2alpha1",
        }
        until(lambda: self.curl(api, "GET", f"v2/{name}")["state"]["state"] == "ACTIVE")
        queued = self.curl(api, "GET", f"v2/{name}")
        specs = queued["tpu"]["nodeSpec"]
        assert [spec["nodeId"] for spec in specs] == [
            f"your-queued-resource-id-{index}" for index in range(4)
        ]
        assert all(spec["node"]["acceleratorType"] == "v4-16" for spec in specs)
        assert "reserved" not in queued["guaranteed"]
        assert queued["reservationName"] == f"{PAGE}/reservations/-"
        alpha = self.curl(api, "GET", f"v2alpha1/{name}")
        assert alpha["guaranteed"]["reserved"] is True
        self.curl(api, "DELETE", f"v2/{name}?force=true")
        until(lambda: "error" in self.curl(api, "GET", f"v2/{name}"))


class TestQueuedResources:
    def test_states_and_their_data(self, api: LocalCloud) -> None:
        api.create("q", queueingPolicy={"validAfterDuration": "3600s"})
        until(lambda: api.state_of("q") == "WAITING_FOR_RESOURCES")
        assert api.call("GET", f"{QUEUED}/q")["state"] == {"state": "WAITING_FOR_RESOURCES"}
        api.create("active")
        api.active("active")
        assert api.call("GET", f"{QUEUED}/active")["state"] == {
            "state": "ACTIVE",
            "activeData": {},
        }

    def test_failed_tells_why(self, api: LocalCloud) -> None:
        api.raw(
            "POST", "/regrow/v1/capacity", '{"zone":"us-central2-b","generation":"v2","chips":0}'
        )
        api.create("q", "v2-8", queueingPolicy={"validUntilDuration": "0.2s"})
        until(lambda: api.state_of("q") == "FAILED")
        state = api.call("GET", f"{QUEUED}/q")["state"]
        assert state["failedData"]["error"]["code"] == 4
        assert "expired" in state["failedData"]["error"]["message"]

    def test_preempted_by_the_service(self, api: LocalCloud) -> None:
        api.create("q", spot={})
        api.active("q")
        body = json.dumps({"name": f"{QUEUED}/q"})
        assert api.raw("POST", "/regrow/v1/preempt", body)[0] == 200
        until(lambda: api.state_of("q") == "SUSPENDED")
        state = api.call("GET", f"{QUEUED}/q")["state"]
        assert state == {"state": "SUSPENDED", "stateInitiator": "SERVICE", "suspendedData": {}}
        assert api.node("q-0")["state"] == "PREEMPTED"

    def test_enums_and_spellings(self, api: LocalCloud) -> None:
        body = {
            "tpu": {
                "node_spec": [
                    {
                        "parent": ZONE,
                        "node": {
                            "accelerator_config": {"type": 7, "topology": "2x2x2"},
                            "runtimeVersion": "tpu-vm-base",
                            "data_disks": [{"source_disk": "d", "mode": 2}],
                        },
                        "multislice_params": {"node_count": "2"},
                    }
                ]
            }
        }
        api.call("POST", f"{QUEUED}?queued_resource_id=q&%24alt=json;enum-encoding=int", body)
        api.active("q")
        node = api.node("q-1")
        assert node["acceleratorType"] == "v4-16"
        assert node["acceleratorConfig"] == {"type": "V4", "topology": "2x2x2"}
        assert node["dataDisks"] == [{"sourceDisk": "d", "mode": "READ_ONLY"}]
        assert node["multisliceNode"] is True
        ints = api.call("GET", f"{NODES}/q-1?$alt=json;enum-encoding=int")
        assert ints["acceleratorConfig"]["type"] == 7
        assert ints["state"] == 2
        assert ints["dataDisks"][0]["mode"] == 2
        queued = api.call("GET", f"{QUEUED}/q?$alt=json%3Benum-encoding%3Dint")
        assert queued["state"]["state"] == 6

    def test_alpha_fields(self, api: LocalCloud) -> None:
        body = request("v5litepod-8", bestEffort={}, provisioningModel="STANDARD")
        del body["tpu"]["nodeSpec"][0]["nodeId"]
        params = {"nodeCount": 2, "workloadType": 1}
        body["tpu"]["nodeSpec"][0]["multiNodeParams"] = params
        api.call("POST", f"{QUEUED}?queuedResourceId=q", body, version="v2alpha1")
        api.active("q")
        assert api.call("GET", f"{QUEUED}/q", version="v2alpha1")["bestEffort"] == {}
        assert "bestEffort" not in api.call("GET", f"{QUEUED}/q")
        ids = [spec["nodeId"] for spec in api.call("GET", f"{QUEUED}/q")["tpu"]["nodeSpec"]]
        assert ids == ["q-0", "q-1"]

    def test_operations_end_with_their_resource(self, api: LocalCloud) -> None:
        creation = api.done(api.create("q"))
        kind = "type.googleapis.com/google.cloud.tpu.v2.QueuedResource"
        assert creation["response"]["@type"] == kind
        assert creation["metadata"]["@type"].endswith("google.cloud.tpu.v2.OperationMetadata")
        api.active("q")
        reset = api.done(api.call("POST", f"{QUEUED}/q:reset", {}))
        assert reset["response"]["@type"] == kind
        assert reset["response"]["state"]["state"] == "ACTIVE"
        deletion = api.done(api.call("DELETE", f"{QUEUED}/q?force=true"))
        assert deletion["response"] == {"@type": "type.googleapis.com/google.protobuf.Empty"}
        assert deletion["metadata"]["verb"] == "delete"
        assert deletion["metadata"]["endTime"]

    def test_delete_without_force(self, api: LocalCloud) -> None:
        api.create("q")
        api.active("q")
        error = api.refused("DELETE", f"{QUEUED}/q")
        assert (error["code"], error["status"]) == (400, "FAILED_PRECONDITION")
        api.done(api.call("DELETE", f"{NODES}/q-0"))
        until(lambda: api.state_of("q") == "SUSPENDED")
        assert api.call("GET", f"{QUEUED}/q")["state"]["stateInitiator"] == "USER"
        api.done(api.call("DELETE", f"{QUEUED}/q"))

    def test_a_request_id_makes_it_once(self, api: LocalCloud) -> None:
        path = f"{QUEUED}?queuedResourceId=q&requestId=abc"
        first = api.call("POST", path, request())
        assert api.call("POST", path, request())["name"] == first["name"]

    def test_pages(self, api: LocalCloud) -> None:
        names = [f"q{index}" for index in range(5)]
        for name in names:
            api.create(name, queueingPolicy={"validAfterDuration": "3600s"})
        found, token = [], ""
        for _ in range(3):
            part = api.call("GET", f"{QUEUED}?pageSize=2&pageToken={token}")
            found += [one["name"].rpartition("/")[2] for one in part["queuedResources"]]
            token = part.get("nextPageToken", "")
        assert found == names
        assert token == ""
        everywhere = ZONE.replace("us-central2-b", "-")
        assert len(api.call("GET", f"{everywhere}/queuedResources")["queuedResources"]) == 5
        assert api.refused("GET", f"{QUEUED}?pageToken=x")["status"] == "INVALID_ARGUMENT"
        assert api.refused("GET", f"{QUEUED}?page_size=-1")["status"] == "INVALID_ARGUMENT"

    def test_maintenance(self, api: LocalCloud) -> None:
        api.create("q", "v4-16", slices=2)
        api.active("q")
        path = f"{QUEUED}/q:performMaintenanceQueuedResource"
        operation = api.call("POST", path, {"nodeNames": ["q-1"]}, version="v2alpha1")
        infos = api.call("GET", f"{QUEUED}/q:getMaintenanceInfo", version="v2alpha1")
        (info,) = infos["nodeUpcomingMaintenances"]
        assert info["nodeName"] == f"{NODES}/q-1"
        assert info["upcomingMaintenance"]["type"] == "UNSCHEDULED"
        assert api.node("q-1")["health"] == "UNHEALTHY_MAINTENANCE"
        assert "error" not in api.done(operation, "v2alpha1")
        wrong = api.refused("POST", path, {"nodeNames": ["x"]}, version="v2alpha1")
        assert wrong["status"] == "INVALID_ARGUMENT"
        assert api.refused("POST", path, {})["status"] == "UNIMPLEMENTED"


class TestNodes:
    def test_life(self, api: LocalCloud) -> None:
        body = node_body("v4-8", labels={"a": "b"}, metadata={"k": "v"})
        creation = api.done(api.call("POST", f"{NODES}?nodeId=n", body))
        assert creation["response"]["@type"] == "type.googleapis.com/google.cloud.tpu.v2.Node"
        node = api.node("n")
        assert creation["response"] == {"@type": creation["response"]["@type"]} | node
        assert node["state"] == "READY"
        assert node["health"] == "HEALTHY"
        assert node["apiVersion"] == "V2"
        assert node["id"].isdigit()
        assert len(node["networkEndpoints"]) == 1
        assert node["networkEndpoints"][0]["ipAddress"].startswith("127.")
        assert "Simulated" in node["healthDescription"]
        assert [one["name"] for one in api.call("GET", NODES)["nodes"]] == [f"{NODES}/n"]
        for verb, state in (("stop", "STOPPED"), ("start", "READY")):
            ended = api.done(api.call("POST", f"{NODES}/n:{verb}", {}))
            assert ended["response"]["state"] == state
            assert ended["response"]["@type"].endswith(".v2.Node")
        ended = api.done(api.call("DELETE", f"{NODES}/n"))
        assert ended["response"]["@type"].endswith("google.protobuf.Empty")

    def test_patch(self, api: LocalCloud) -> None:
        api.done(api.call("POST", f"{NODES}?node_id=n", node_body("v4-8", description="old")))
        body = {
            "description": "new",
            "metadata": {"a": "b"},
            "network_config": {"enable_external_ips": True},
        }
        mask = "description,metadata,network_config.enable_external_ips"
        ended = api.done(api.call("PATCH", f"{NODES}/n?update_mask={mask}", body))
        assert ended["response"]["description"] == "new"
        node = api.node("n")
        assert node["metadata"] == {"a": "b"}
        assert node["networkConfig"]["enableExternalIps"] is True
        assert "externalIp" in node["networkEndpoints"][0]["accessConfig"]
        assert "update_mask" in api.refused("PATCH", f"{NODES}/n?updateMask=state", {})["message"]

    def test_guest_attributes_of_workers(self, api: LocalCloud) -> None:
        api.done(api.call("POST", f"{NODES}?nodeId=n", node_body("v4-16")))
        told = api.call("POST", f"{NODES}/n:getGuestAttributes", {"workerIds": ["1"]})
        assert told == {"guestAttributes": [{"queryPath": "", "queryValue": {"items": []}}]}
        told = api.call("POST", f"{NODES}/n:getGuestAttributes", {})
        assert len(told["guestAttributes"]) == 2
        error = api.refused("POST", f"{NODES}/n:getGuestAttributes", {"workerIds": ["2"]})
        assert error["message"] == "worker_ids: '2' is not within [0, 1]."

    def test_a_maintenance_event(self, api: LocalCloud) -> None:
        api.done(api.call("POST", f"{NODES}?nodeId=n", node_body()))
        path = f"{NODES}/n:simulateMaintenanceEvent"
        operation = api.call("POST", path, {"workerIds": []}, version="v2alpha1")
        assert api.call("GET", f"{NODES}/n")["upcomingMaintenance"]
        ended = api.done(operation, "v2alpha1")
        assert ended["response"]["@type"].endswith("v2alpha1.Node")
        assert ended["response"]["state"] == "READY"

    def test_no_capacity(self, api: LocalCloud) -> None:
        body = '{"zone":"us-central2-b","generation":"v3","chips":0}'
        api.raw("POST", "/regrow/v1/capacity", body)
        ended = api.done(api.call("POST", f"{NODES}?nodeId=n", node_body("v3-8")))
        assert ended["error"]["code"] == 8
        assert "no more capacity" in ended["error"]["message"]


class TestTheRest:
    def test_operations(self, api: LocalCloud) -> None:
        operation = api.create("q")
        listed = api.call("GET", f"{ZONE}/operations?pageSize=1000")["operations"]
        assert operation["name"] in [one["name"] for one in listed]
        assert api.call("POST", f"{operation['name']}:cancel", {}) == {}
        assert api.call("DELETE", operation["name"]) == {}
        assert api.refused("GET", operation["name"])["code"] == 404

    def test_what_there_is(self, api: LocalCloud) -> None:
        locations = api.call("GET", "projects/p/locations")["locations"]
        assert "us-central2-b" in [one["locationId"] for one in locations]
        assert len(locations) == 4
        assert api.call("GET", "projects/p/locations/us-central2-b")["name"]
        types = api.call("GET", f"{ZONE}/acceleratorTypes?pageSize=1000")["acceleratorTypes"]
        (v4,) = [one for one in types if one["type"] == "v4-16"]
        assert v4["acceleratorConfigs"] == [{"type": "V4", "topology": "2x2x2"}]
        assert api.call("GET", v4["name"]) == v4
        versions = api.call("GET", f"{ZONE}/runtimeVersions")["runtimeVersions"]
        assert api.call("GET", versions[0]["name"]) == versions[0]
        found = api.call("GET", f"{ZONE}/reservations", version="v2alpha1")["reservations"]
        (v4,) = [one for one in found if one["standard"]["resourceType"] == "v4"]
        assert v4["standard"]["capacityUnits"] == "CHIPS"
        assert v4["standard"]["usage"] == {"total": "0"}
        identity = api.call("POST", f"{ZONE}:generateServiceIdentity", {})["identity"]
        assert identity["email"].endswith("gserviceaccount.com")


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "status", "text"),
    [
        ("POST", f"{QUEUED}?queuedResourceId=q", request("v4-3"), 400, "INVALID_ARGUMENT", "v4-3"),
        ("POST", f"{QUEUED}?queuedResourceId=a%20b", request(), 400, "INVALID_ARGUMENT", "pattern"),
        ("POST", QUEUED, request(), 400, "INVALID_ARGUMENT", "queued_resource_id"),
        (
            "POST",
            f"{QUEUED}?queuedResourceId=q",
            request("v4-8", 257),
            400,
            "INVALID_ARGUMENT",
            "257",
        ),
        ("POST", f"{QUEUED}?queuedResourceId=q", request("v3-8", 2), 400, "INVALID_ARGUMENT", "v4"),
        ("POST", f"{QUEUED}?queuedResourceId=q&x=1", request(), 400, "INVALID_ARGUMENT", '"x"'),
        ("POST", f"{QUEUED}?queuedResourceId=q", {"tpo": {}}, 400, "INVALID_ARGUMENT", '"tpo"'),
        ("POST", f"{QUEUED}?queuedResourceId=q", [], 400, "INVALID_ARGUMENT", "object"),
        (
            "POST",
            f"{QUEUED}?queuedResourceId=q",
            {"tpu": {"nodeSpec": {}}},
            400,
            "INVALID_ARGUMENT",
            "list",
        ),
        (
            "POST",
            f"{QUEUED}?queuedResourceId=q",
            request("v4-4096"),
            429,
            "RESOURCE_EXHAUSTED",
            "Limit: 128",
        ),
        ("GET", f"{QUEUED}/nobody", None, 404, "NOT_FOUND", "nobody"),
        ("GET", "projects/p/locations/mars/nodes", None, 404, "NOT_FOUND", "mars"),
        ("GET", f"{ZONE}/acceleratorTypes/v9-8", None, 404, "NOT_FOUND", "v9-8"),
        ("GET", f"{ZONE}/bananas", None, 404, "NOT_FOUND", "Method not found"),
        ("DELETE", f"{QUEUED}/q?force=perhaps", None, 400, "INVALID_ARGUMENT", "force"),
        ("GET", f"{ZONE}/reservations", None, 501, "UNIMPLEMENTED", "v2alpha1"),
        (
            "GET",
            f"{ZONE}/acceleratorTypes?filter=a%20OR%20b",
            None,
            400,
            "INVALID_ARGUMENT",
            "filter",
        ),
    ],
)
def test_refusals(
    api: LocalCloud, method: str, path: str, body: Any, code: int, status: str, text: str
) -> None:
    error = api.refused(method, path, body)
    assert (error["code"], error["status"]) == (code, status)
    assert text in error["message"]


def test_the_path_of_a_wrong_field(api: LocalCloud) -> None:
    body = request()
    body["tpu"]["nodeSpec"][0]["node"]["acceleratorConfig"] = {"type": "V7"}
    error = api.refused("POST", f"{QUEUED}?queuedResourceId=q", body)
    where = "tpu.nodeSpec[0].node.acceleratorConfig.type"
    assert error["details"][0]["fieldViolations"][0]["field"] == where
    assert "V4" in error["message"]


@pytest.mark.parametrize("body", ["{", '{"tpu": NaN}', "[" * 100_000, b"\xff\xfe", '"\\ud800"'])
def test_what_is_no_json(api: LocalCloud, body: Any) -> None:
    status, answer = api.raw("POST", f"/v2/{QUEUED}?queuedResourceId=q", body)
    assert status == 400
    assert answer["error"]["status"] == "INVALID_ARGUMENT"


def test_a_body_that_is_too_large(api: LocalCloud) -> None:
    status, answer = api.raw("POST", f"/v2/{QUEUED}?queuedResourceId=q", b"x" * (5 << 20))
    assert status == 400
    assert "size exceeds" in answer["error"]["message"]


def test_duplicates(api: LocalCloud) -> None:
    api.create("q")
    error = api.refused("POST", f"{QUEUED}?queuedResourceId=q", request(node_id="other"))
    assert (error["code"], error["status"]) == (409, "ALREADY_EXISTS")
    error = api.refused("POST", f"{QUEUED}?queuedResourceId=other", request(node_id="q-0"))
    assert (error["code"], error["status"]) == (409, "ALREADY_EXISTS")


class TestAccess:
    def test_a_web_page_is_kept_out(self, api: LocalCloud) -> None:
        for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            status, answer = api.raw("GET", f"/v2/{QUEUED}", None, headers)
            assert (status, answer["error"]["status"]) == (403, "PERMISSION_DENIED")

    def test_unless_it_has_the_token(self, api: LocalCloud) -> None:
        token = api.directory.token()
        headers = {"Origin": "https://mine.example", "Authorization": f"Bearer {token}"}
        assert api.raw("GET", f"/v2/{QUEUED}", None, headers)[0] == 200

    def test_the_token_is_the_owners(self, api: LocalCloud) -> None:
        assert (api.directory.path / "token").stat().st_mode & 0o777 == 0o600
