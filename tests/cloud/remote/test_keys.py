from __future__ import annotations

from pathlib import Path

import pytest
from cloud_server import LocalCloud
from cloud_world import PLACE, node_body

from regrow.cloud.client import CloudClient
from regrow.cloud.remote.keys import propagate, public_key
from regrow.errors import UsageError


def test_a_key_is_added_once_to_what_is_there(simulated: LocalCloud) -> None:
    client = CloudClient(simulated.directory.server().endpoint)
    metadata = {"startup-script": "true", "ssh-keys": "she:ssh-rsa B"}
    for node_id in ("n", "m"):
        body = node_body("v4-8", metadata=metadata)
        client.wait(client.create_node(PLACE, node_id, body), 30)
    assert propagate(client, PLACE, ["n"], "me", "ssh-rsa A") == ["n"]
    assert propagate(client, PLACE, ["n", "m"], "me", "ssh-rsa A") == ["m"]
    for node_id in ("n", "m"):
        told = client.node(PLACE, node_id)["metadata"]
        assert told == metadata | {"ssh-keys": "she:ssh-rsa B\nme:ssh-rsa A"}
    client.close()


def test_the_public_part(tmp_path: Path) -> None:
    (tmp_path / "k.pub").write_text("ssh-rsa A me\n")
    assert public_key(str(tmp_path / "k")) == "ssh-rsa A me"
    with pytest.raises(UsageError, match="make one with: ssh-keygen -f"):
        public_key(str(tmp_path / "other"))
