from __future__ import annotations

import pytest

from regrow.cloud.remote.copying import RemotePath, Transfer
from regrow.cloud.remote.sessions import SshShell
from regrow.cloud.remote.targets import Host, chosen
from regrow.errors import LaunchError, UsageError

HOST = Host("q-0", 0, 1, "10.0.0.2", "203.0.113.7")


def test_ssh_is_told_where_and_how():
    shell = SshShell("me", key_file="/k", flags=("-v",))
    assert shell.argv(HOST, "echo 'a b'") == [
        "ssh", "-i", "/k", "-o", "StrictHostKeyChecking=accept-new", "-o", "ServerAliveInterval=15",
        "-v", "-T", "-o", "BatchMode=yes", "me@203.0.113.7", "echo 'a b'",
    ]  # fmt: skip
    assert shell.argv(HOST, "")[-1] == "me@203.0.113.7"
    assert SshShell(internal=True).argv(HOST, "x")[-2:] == ["10.0.0.2", "x"]


def test_a_host_without_an_external_address():
    with pytest.raises(LaunchError, match="give --internal-ip"):
        SshShell().argv(Host("q-0", 0, 1, "10.0.0.2"), "x")


def test_scp_copies_over_the_same_way():
    ends = (RemotePath.of("a"), RemotePath.of("./b:c"))
    transfer = Transfer(ends, RemotePath.of("me@q:~/"), recurse=True, compress=True)
    assert transfer.remote == RemotePath("q", "me", "~/")
    told = transfer.describe(SshShell("me", key_file="/k"), HOST)
    assert told.startswith("scp -i /k ")
    assert told.endswith("-r -C -- a ./b:c 'me@203.0.113.7:~/'")


def test_indices():
    assert chosen("--node", "all", 3) == [0, 1, 2]
    assert chosen("--node", "1,4,6-7", 8) == [1, 4, 6, 7]
    for wrong in ("8", "2-1", "", "a", "1,", "-1"):
        with pytest.raises(UsageError):
            chosen("--node", wrong, 8)
