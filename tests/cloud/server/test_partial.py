from __future__ import annotations

import pytest

from regrow.cloud.server.filters import parse_filter
from regrow.cloud.server.partial import partial
from regrow.errors import CloudApiError

ANSWER = {
    "nodes": [
        {"name": "a", "networkConfig": {"network": "n", "subnetwork": "s"}, "tags": ["x"]},
        {"name": "b", "metadata": {"startup-script": "echo", "other": "1"}},
    ],
    "nextPageToken": "t",
}


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ("nextPageToken", {"nextPageToken": "t"}),
        ("next_page_token", {"nextPageToken": "t"}),
        ("nodes/name", {"nodes": [{"name": "a"}, {"name": "b"}]}),
        ("nodes(name,tags)", {"nodes": [{"name": "a", "tags": ["x"]}, {"name": "b"}]}),
        (
            "nextPageToken, nodes(networkConfig/network)",
            {"nodes": [{"networkConfig": {"network": "n"}}, {}], "nextPageToken": "t"},
        ),
        ("nodes/metadata/startup-script", {"nodes": [{}, {"metadata": {"startup-script": "echo"}}]}),
        ("nodes/*/network", {"nodes": [
            {"name": "a", "networkConfig": {"network": "n"}, "tags": ["x"]},
            {"name": "b", "metadata": {}},
        ]}),
        ("*", ANSWER),
        ("nothing", {}),
    ],
)  # fmt: skip
def test_fields(fields, left):
    assert partial(ANSWER, fields) == left


@pytest.mark.parametrize("fields", ["a(", "a)", "a(b", "(a)", "a,", "/a", "a//b", "a" + "/a" * 40])
def test_no_fields(fields):
    with pytest.raises(CloudApiError, match="Invalid field selection"):
        partial(ANSWER, fields)


ITEM = {
    "name": "projects/p/acceleratorTypes/v4-16",
    "type": "v4-16",
    "done": True,
    "size": 16,
    "configs": [{"topology": "2x2x2"}, {"topology": "4x4"}],
    "labels": {"team": "red"},
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("type=v4-16", True),
        ('type = "v4-16"', True),
        ("type=v4", False),
        ("type:V4", True),
        ("name:v4-16 AND done=true", True),
        ("name:v4-16 size>15", True),
        ("size>=16 AND size<17 AND size!=3", True),
        ("size<9", False),
        ("configs.topology:4x4", True),
        ("configs.topology=2x2", False),
        ("labels.team=red", True),
        ("labels:team", True),
        ("missing:*", False),
        ("NOT missing:*", True),
        ("-type=v5", True),
        ("v4", True),
        ("v5", False),
    ],
)
def test_filter(text, wanted):
    assert parse_filter(text)(ITEM) is wanted


@pytest.mark.parametrize("text", ["a OR b", "(a)", "a=", "=a", 'a="', "a AND", "a!b"])
def test_no_filter(text):
    with pytest.raises(CloudApiError, match="Invalid filter"):
        parse_filter(text)
