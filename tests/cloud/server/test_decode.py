"""Whatever a client sends is either understood or refused, never a failure of the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cloud_world import PLACE, World, request
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.cloud.server.decode import boolean, camel, decode, parse_body, parse_query
from regrow.cloud.server.pages import page
from regrow.cloud.server.render import Renderer, encode
from regrow.cloud.server.schema import ENUMS, MESSAGES, Field
from regrow.errors import CloudApiError, Code

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["v4-16", "tpu-vm-base", "3s", "1e9s", "2030-01-01T00:00:00Z", "99999-1-1"]),
)


REFUSALS = (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)


def refused(error: CloudApiError) -> None:
    """Every refusal is one of the client's own mistakes."""
    assert error.code in REFUSALS


def values(field: Field, depth: int) -> st.SearchStrategy[Any]:
    """Values of a field, most of them right."""
    if field.type in MESSAGES and depth:
        right: st.SearchStrategy[Any] = messages(field.type, depth - 1)
    elif field.type in ENUMS:
        names = ENUMS[field.type]
        right = st.sampled_from([*names, *names.values(), "NO", 99])
    else:
        right = {
            "string": st.sampled_from(["v4-16", "v3-8", "tpu-vm-base", PLACE.name, "n", ""]),
            "bool": st.booleans(),
            "int32": st.integers(-1, 300),
            "int64": st.integers(-1, 300).map(str),
            "duration": st.sampled_from(["0s", "1.5s", "100000000000s"]),
            "time": st.sampled_from(
                ["2030-01-01T00:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59+14:00"]
            ),
            "map": st.dictionaries(st.sampled_from(["a", "startup-script"]), st.text(max_size=3)),
        }.get(field.type, SCALARS)
    one = st.one_of(right, right, right, SCALARS)
    return st.lists(one, max_size=2) if field.repeated else one


def messages(name: str, depth: int) -> st.SearchStrategy[Any]:
    fields = MESSAGES[name]
    return st.fixed_dictionaries(
        {}, optional={key: values(field, depth) for key, field in fields.items()}
    )


@settings(max_examples=60, deadline=None)
@given(body=messages("QueuedResource", 4), data=st.data())
def test_any_queued_resource_is_taken_or_refused(body: Any, data: st.DataObject) -> None:
    world = World()
    if data.draw(st.booleans()):
        # Something that gets far, with one part of it changed.
        base = request("v4-16", data.draw(st.sampled_from([1, 2])))
        spec = base["tpu"]["nodeSpec"][0]
        spec["node"] |= data.draw(messages("Node", 2))
        body = base | {key: value for key, value in body.items() if key != "tpu"}
    try:
        decoded = parse_body(json.dumps(body).encode(), "QueuedResource")
        operation = world.plane.queued.create(PLACE, "q", decoded, world.now)
    except CloudApiError as error:
        refused(error)
        return
    world.did(None)
    world.settle(1)
    renderer = Renderer(world.config, lambda host: f"127.64.0.{host}")
    for version in ("v2", "v2alpha1"):
        for ints in (False, True):
            json.dumps(renderer.operation(operation, version, ints=ints))
            json.dumps(renderer.queued(world.queued("q"), version, ints=ints))
            for node in world.nodes("q"):
                json.dumps(renderer.node(node, version, ints=ints))


@given(text=st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
def test_any_bytes(text: bytes) -> None:
    try:
        assert isinstance(parse_body(text, "Node"), dict)
    except CloudApiError as error:
        refused(error)


@given(body=messages("Node", 3))
def test_what_is_understood_is_understood_again(body: Any) -> None:
    try:
        decoded = decode(body, "Node", "")
    except CloudApiError:
        return
    shown = encode(decoded, "Node", "v2alpha1", ints=True)
    assert decode(json.loads(json.dumps(shown)), "Node", "") == decoded


@given(token=st.text(max_size=20), size=st.text(max_size=12))
def test_any_page(token: str, size: str) -> None:
    try:
        taken, _ = page([(1, "a"), (2, "b")], {"pageToken": token, "pageSize": size})
    except CloudApiError as error:
        refused(error)
    else:
        assert taken in ([], ["a"], ["b"], ["a", "b"])


def test_spellings() -> None:
    assert camel("queued_resource_id") == camel("queuedResourceId") == "queuedResourceId"
    query = parse_query([("request_id", "a"), ("$alt", "json;enum-encoding=int")], ["requestId"])
    assert query["requestId"] == "a"
    assert boolean({"force": "True"}, "force")
    with pytest.raises(CloudApiError, match="alt=json"):
        parse_query([("alt", "media")], [])
    with pytest.raises(CloudApiError, match="given twice"):
        parse_body(b'{"node_id": "a", "nodeId": "b"}', "NodeSpec")
