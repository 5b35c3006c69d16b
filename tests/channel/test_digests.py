"""The program that asks for hashes, as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from regrow.channel.digests import CopySpec, DigestRequest, is_request
from regrow.errors import Code, StatusError

COPIES = (CopySpec(11, (2, 3), b"\x08\x03"), CopySpec(2, (), b""))


@pytest.mark.parametrize("copies", [(), COPIES])
def test_what_is_asked_is_what_is_read(copies: tuple[CopySpec, ...]) -> None:
    request = DigestRequest((3, 1), 2, copies)
    data = b"a prefix:" + request.text().encode()
    assert is_request(data)
    assert DigestRequest.read(data) == request


def told(**changes: Any) -> str:
    return json.dumps(
        {"regrowDigestRequest": {"devices": [0], "arrays": 1, "copies": []} | changes}
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        '{"regrowDigestRequest": 1}',
        told(devices=[]),
        told(devices=[0, 0]),
        told(devices="x"),
        told(arrays=0),
        told(copies=None),
        told(copies=[[11, [2], "", 3]]),
        told(copies=[[11, [-2], ""]]),
        told(copies=[[11, [2], "?"]]),
        told(copies=[[11, [2], ""]] * 2),
    ],
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(StatusError, match="a request for hashes that is none") as caught:
        DigestRequest.read(text.encode())
    assert caught.value.code is Code.INVALID_ARGUMENT
