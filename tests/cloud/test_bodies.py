from __future__ import annotations

import pytest

from regrow.cloud.bodies import NodeRequest, QueuedRequest, parse_duration, parse_pairs
from regrow.cloud.names import Place
from regrow.errors import UsageError

PLACE = Place("p", "z")


def test_pairs():
    assert parse_pairs("--metadata", ("a=1,b=x=y", "c=")) == {"a": "1", "b": "x=y", "c": ""}
    assert parse_pairs("--metadata", ("startup-script=echo hi, there",)) == {
        "startup-script": "echo hi, there"
    }
    assert parse_pairs("--metadata", ("^:^a=1,b=2:c=3",)) == {"a": "1,b=2", "c": "3"}
    with pytest.raises(UsageError, match="KEY=VALUE"):
        parse_pairs("--labels", ("a",))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3600s", 3600), ("6h", 21600), ("1d12h", 129600), ("90", 90), ("0.5s", 0.5)],
)
def test_durations(text, seconds):
    assert parse_duration("--x", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "1x", "h1", "-1s"])
def test_no_durations(text):
    with pytest.raises(UsageError):
        parse_duration("--x", text)


def test_a_node_has_what_was_given():
    node = NodeRequest(
        runtime_version="v", type="v5litepod", topology="4x4", internal_ips=True, tags=("a",),
        data_disks=({"source": "d", "mode": "read-only"},), service_account="me", scopes=("s",),
        spot=True,
    )  # fmt: skip
    with pytest.raises(UsageError, match="go together"):
        NodeRequest(runtime_version="v", type="v4").body()
    assert node.body() == {
        "acceleratorConfig": {"type": "V5LITE_POD", "topology": "4x4"},
        "runtimeVersion": "v",
        "networkConfig": {"network": "default", "enableExternalIps": False},
        "tags": ["a"],
        "dataDisks": [{"sourceDisk": "d", "mode": "READ_ONLY"}],
        "serviceAccount": {"email": "me", "scope": ["s"]},
        "schedulingConfig": {"spot": True},
    }


def test_reservations_and_policies():
    node = NodeRequest(runtime_version="v", accelerator_type="v4-8")
    body = QueuedRequest(node=node, node_count=2, node_prefix="n", reserved=True).body(PLACE)
    assert body["reservationName"] == "projects/p/locations/z/reservations/-"
    (spec,) = body["tpu"]["nodeSpec"]
    assert spec["multisliceParams"] == {"nodeCount": 2, "nodeIdPrefix": "n"}
    later = QueuedRequest(node=node, node_id="n", valid_after_duration="6h").body(PLACE)
    assert later["queueingPolicy"] == {"validAfterDuration": "21600.0s"}
    both = QueuedRequest(
        node=node, node_id="n", valid_until_duration="1h", valid_until_time="2100-01-01T00:00:00Z"
    )
    with pytest.raises(UsageError, match="exclude each other"):
        both.body(PLACE)
    named = QueuedRequest(node=node, node_id="n", reservation="mine").body(PLACE)
    assert named["reservationName"].endswith("/reservations/mine")
