"""The hosts of all slices that a prefix names."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final

from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place, base
from regrow.cloud.remote.targets import Host, hosts_of_node, hosts_of_queued
from regrow.errors import CloudApiError, Code, UsageError

_METADATA_VARIABLES: Final = ("GCE_METADATA_IP", "GCE_METADATA_HOST")
_ANY_PORT: Final = 9


def hosts_of_prefix(client: CloudClient, place: Place, prefix: str) -> list[Host]:
    """All hosts of what a prefix names.

    That is the queued resource or the slice of that name, else the slices PREFIX-0, PREFIX-1, …

    Raises:
        UsageError: If there are none, or they are not of one shape.
        CloudApiError: If a slice of them has no hosts that run.
    """
    try:
        return hosts_of_queued(client, place, prefix, "all", "all")
    except CloudApiError as error:
        if error.code is not Code.NOT_FOUND:
            raise
    nodes = {base(str(node["name"])): node for node in client.list_nodes(place)}
    if prefix in nodes:
        return hosts_of_node(nodes[prefix], prefix, 0, "all")
    names = _numbered(prefix, nodes)
    if not names:
        raise UsageError(
            f"no queued resource or slice of {place.name} is called {prefix} or {prefix}-0, "
            f"{prefix}-1, …; see: regrow queued-resources list"
        )
    _check_one_shape(prefix, [nodes[name] for name in names])
    return [
        host
        for index, name in enumerate(names)
        for host in hosts_of_node(nodes[name], name, index, "all")
    ]


def _numbered(prefix: str, names: Iterable[str]) -> list[str]:
    """Those that are called PREFIX-NUMBER, by their numbers."""
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    found = [(int(match[1]), name) for name in names if (match := pattern.fullmatch(name))]
    return [name for _, name in sorted(found)]


def _check_one_shape(prefix: str, nodes: Sequence[dict[str, Any]]) -> None:
    shapes = sorted({str(node.get("acceleratorType")) for node in nodes})
    if len(shapes) > 1:
        raise UsageError(
            f"the slices {prefix}-… are of several shapes ({', '.join(shapes)}): "
            "a Multislice program needs one; give the name of one queued resource"
        )


def is_this_machine(host: Host) -> bool:
    """Whether this process runs on a host itself."""
    for name in _METADATA_VARIABLES:
        if os.environ.get(name, "").partition(":")[0] == host.address:
            return True
    # What is sent to an address of our own has that very address as its source; nothing is sent.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.address, _ANY_PORT))
        except (OSError, UnicodeError):
            return False
        return str(probe.getsockname()[0]) == host.address


def refuse_workers(hosts: Sequence[Host]) -> None:
    """Refuses to run on one of the hosts that are to be worked on.

    Raises:
        UsageError: If this is one.
    """
    for host in hosts:
        if is_this_machine(host):
            raise UsageError(
                f"this is {host.label} ({host.node}) itself: what runs on a worker is ended before "
                "a run begins; start it from another machine"
            )
