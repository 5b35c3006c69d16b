"""Google's own clients against the local server; skipped where they are not installed."""

from __future__ import annotations

import importlib
import json
from importlib import resources
from typing import Any

import pytest
from cloud_server import ZONE, LocalCloud

from regrow.cloud.server.methods import METHODS
from regrow.cloud.server.schema import ENUMS, MESSAGES
from waiting import until

# Their own deprecations are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

WHY = "Google's clients are not installed: pip install 'regrow[google]'"
QUEUED = f"{ZONE}/queuedResources"


@pytest.fixture
def tpu_v2() -> Any:
    return pytest.importorskip("google.cloud.tpu_v2", reason=WHY)


@pytest.fixture
def discovery() -> Any:
    return pytest.importorskip("googleapiclient.discovery", reason=WHY)


class TestOfficialClient:
    """google-cloud-tpu over REST, which it has for v2."""

    @pytest.fixture
    def client(self, tpu_v2: Any, simulated: LocalCloud) -> Any:
        from google.api_core.client_options import ClientOptions
        from google.auth.credentials import AnonymousCredentials

        endpoint = simulated.directory.server().endpoint
        with tpu_v2.TpuClient(
            credentials=AnonymousCredentials(),
            transport="rest",
            client_options=ClientOptions(api_endpoint=endpoint),
        ) as client:
            yield client

    def request(self, tpu_v2: Any, name: str, **fields: Any) -> Any:
        params = tpu_v2.QueuedResource.Tpu.NodeSpec.MultisliceParams(
            node_count=4, node_id_prefix=f"{name}-slice"
        )
        config = tpu_v2.AcceleratorConfig(type_=tpu_v2.AcceleratorConfig.Type.V4, topology="2x2x2")
        node = tpu_v2.Node(
            accelerator_config=config,
            runtime_version="tpu-ubuntu2204-base",
            data_disks=[{"source_disk": "d", "mode": "READ_ONLY"}],
        )
        spec = tpu_v2.QueuedResource.Tpu.NodeSpec(parent=ZONE, node=node, multislice_params=params)
        return tpu_v2.QueuedResource(tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]), **fields)

    def test_walk(self, tpu_v2: Any, client: Any, simulated: LocalCloud) -> None:
        exceptions = importlib.import_module("google.api_core.exceptions")
        states = tpu_v2.QueuedResourceState.State
        body = self.request(tpu_v2, "walk")
        creation = client.create_queued_resource(
            parent=ZONE, queued_resource=body, queued_resource_id="walk"
        )
        created = creation.result(timeout=30)
        assert isinstance(created, tpu_v2.QueuedResource)
        assert creation.metadata.verb == "create"
        name = f"{QUEUED}/walk"
        simulated.active("walk")
        queued = client.get_queued_resource(name=name)
        assert queued.state.state == states.ACTIVE
        assert [spec.node_id for spec in queued.tpu.node_spec] == [
            f"walk-slice-{index}" for index in range(4)
        ]
        listed = list(client.list_queued_resources(request={"parent": ZONE, "page_size": 1}))
        assert name in [one.name for one in listed]
        node = client.get_node(name=f"{ZONE}/nodes/walk-slice-3")
        assert node.state == tpu_v2.Node.State.READY
        assert node.accelerator_config.type_ == tpu_v2.AcceleratorConfig.Type.V4
        assert node.multislice_node
        assert node.queued_resource == name
        assert len(node.network_endpoints) == 2
        reset = client.reset_queued_resource(request={"name": name})
        assert reset.result(timeout=30).state.state == states.ACTIVE
        with pytest.raises(exceptions.Conflict):
            client.create_queued_resource(
                parent=ZONE, queued_resource=body, queued_resource_id="walk"
            )
        with pytest.raises(exceptions.BadRequest, match="use force"):
            client.delete_queued_resource(name=name)
        client.delete_queued_resource(request={"name": name, "force": True}).result(timeout=30)
        with pytest.raises(exceptions.NotFound):
            client.get_queued_resource(name=name)

    def test_nodes(self, tpu_v2: Any, client: Any) -> None:
        node = tpu_v2.Node(accelerator_type="v4-8", runtime_version="tpu-vm-base")
        made = client.create_node(parent=ZONE, node=node, node_id="own").result(timeout=30)
        assert made.state == tpu_v2.Node.State.READY
        name = made.name
        stopped = client.stop_node(request={"name": name}).result(timeout=30)
        assert stopped.state == tpu_v2.Node.State.STOPPED
        started = client.start_node(request={"name": name}).result(timeout=30)
        assert started.state == tpu_v2.Node.State.READY
        patch = tpu_v2.Node(name=name, description="new")
        mask = {"paths": ["description"]}
        changed = client.update_node(node=patch, update_mask=mask).result(timeout=30)
        assert changed.description == "new"
        told = client.get_guest_attributes(request={"name": name})
        assert len(told.guest_attributes) == 1
        client.delete_node(name=name).result(timeout=30)
        assert name not in [one.name for one in client.list_nodes(parent=ZONE)]

    def test_what_there_is(self, client: Any) -> None:
        types = [one.type_ for one in client.list_accelerator_types(parent=ZONE)]
        assert "v5litepod-16" in types
        request = {"parent": ZONE, "filter": "type:v5litepod AND NOT type=v5litepod-16"}
        some = [one.type_ for one in client.list_accelerator_types(request=request)]
        assert set(some) == {name for name in types if "v5litepod" in name} - {"v5litepod-16"}
        assert list(client.list_runtime_versions(parent=ZONE))
        assert client.generate_service_identity(request={"parent": ZONE}).identity.email

    def test_quota(self, tpu_v2: Any, client: Any) -> None:
        exceptions = importlib.import_module("google.api_core.exceptions")
        body = self.request(tpu_v2, "big")
        body.tpu.node_spec[0].multislice_params.node_count = 256
        with pytest.raises(exceptions.TooManyRequests, match="Quota limit"):
            client.create_queued_resource(
                parent=ZONE, queued_resource=body, queued_resource_id="big"
            )


class TestDiscoveryClient:
    """google-api-python-client, which has v2alpha1 over REST."""

    def test_walk(self, discovery: Any, simulated: LocalCloud) -> None:
        from google.auth.credentials import AnonymousCredentials

        errors = importlib.import_module("googleapiclient.errors")
        service = discovery.build(
            "tpu",
            "v2alpha1",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": simulated.directory.server().endpoint},
            static_discovery=True,
        )
        with service:
            zone = service.projects().locations()
            queued = zone.queuedResources()
            spec = {
                "parent": ZONE,
                "node": {"acceleratorType": "v4-16", "runtimeVersion": "tpu-ubuntu2204-base"},
                "multiNodeParams": {"nodeCount": 2, "nodeIdPrefix": "alpha"},
            }
            body = {"tpu": {"nodeSpec": [spec]}, "guaranteed": {"reserved": True}}
            operation = queued.create(
                parent=ZONE, queuedResourceId="alpha", body=body, requestId="1"
            ).execute()
            simulated.active("alpha")
            operation = zone.operations().get(name=operation["name"]).execute()
            assert operation["response"]["@type"].endswith("v2alpha1.QueuedResource")
            name = f"{QUEUED}/alpha"
            assert queued.get(name=name).execute()["guaranteed"]["reserved"] is True
            assert name in [
                one["name"] for one in queued.list(parent=ZONE).execute()["queuedResources"]
            ]
            short = queued.get(name=name, fields="state/state,tpu/nodeSpec(nodeId)").execute()
            ids = [{"nodeId": "alpha-0"}, {"nodeId": "alpha-1"}]
            assert short == {"state": {"state": "ACTIVE"}, "tpu": {"nodeSpec": ids}}
            queued.reset(name=name, body={}).execute()
            node = f"{ZONE}/nodes/alpha-0"
            zone.nodes().get(name=node).execute()
            reservations = zone.reservations().list(parent=ZONE).execute()["reservations"]
            used = {
                one["standard"]["resourceType"]: one["standard"]["usage"] for one in reservations
            }
            assert used["v4"] == {"total": "16"}
            queued.delete(name=name, force=True).execute()
            until(lambda: simulated.raw("GET", f"/v2/{name}")[0] == 404)
            with pytest.raises(errors.HttpError, match="was not found") as refusal:
                queued.get(name=name).execute()
            assert refusal.value.status_code == 404


# Values that a version lacks of an enum that is otherwise the same.
EXTRA = {
    ("v2alpha1", "Node", "apiVersion"): {"V2"},
    ("v2alpha1", "SchedulingConfig", "provisioningModel"): {"FLEX_START"},
}


@pytest.fixture(scope="module", params=["v2", "v2alpha1"])
def document(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("googleapiclient.discovery", reason=WHY)
    folder = resources.files("googleapiclient.discovery_cache.documents")
    return json.loads((folder / f"tpu.{request.param}.json").read_text())


def methods_of(resource: Any) -> list[Any]:
    found = list(resource.get("methods", {}).values())
    for inner in resource.get("resources", {}).values():
        found += methods_of(inner)
    return found


def test_every_method_of_the_discovery_document_is_served(document: Any) -> None:
    version = document["version"]
    for method in methods_of(document):
        _, _, path = method["flatPath"].partition("/")
        pattern = "/".join(
            "*" + part.partition("}")[2] if part.startswith("{") else part
            for part in path.split("/")
        )
        ours = [
            one
            for one in METHODS
            if (one.http, one.pattern) == (method["httpMethod"], pattern)
            and version in one.versions
        ]
        assert len(ours) == 1, method["id"]
        wanted = {name for name in method["parameters"] if name not in ("name", "parent")}
        assert wanted <= set(ours[0].query), method["id"]


def test_the_fields_of_the_discovery_document_are_known(document: Any) -> None:
    version = document["version"]
    for name, schema in document["schemas"].items():
        ours = MESSAGES.get(name)
        if ours is None or name in ("QueuedResourceState", "FailedData"):
            continue
        theirs = dict(schema.get("properties", {}))
        # Output that has no meaning here.
        theirs.pop("protectionTier", None)
        mine = {field for field, one in ours.items() if one.only in (None, version)}
        assert set(theirs) == mine, name
        for field, one in theirs.items():
            values = one.get("enum") or one.get("items", {}).get("enum")
            if values and ours[field].type in ENUMS:
                assert set(values) | EXTRA.get((version, name, field), set()) == set(
                    ENUMS[ours[field].type]
                ), (name, field)


def test_the_numbers_of_enums(tpu_v2: Any) -> None:
    kinds = {
        "AcceleratorConfig.Type": tpu_v2.AcceleratorConfig.Type,
        "AttachedDisk.DiskMode": tpu_v2.AttachedDisk.DiskMode,
        "Node.ApiVersion": tpu_v2.Node.ApiVersion,
        "Node.Health": tpu_v2.Node.Health,
        "Node.State": tpu_v2.Node.State,
        "QueuedResourceState.State": tpu_v2.QueuedResourceState.State,
        "QueuedResourceState.StateInitiator": tpu_v2.QueuedResourceState.StateInitiator,
    }
    for name, kind in kinds.items():
        assert {one.name: one.value for one in kind} == ENUMS[name], name
