"""The public key of whoever calls, in the metadata from which real hosts take the keys they let in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from regrow.cloud.client import CloudClient
from regrow.cloud.names import Place
from regrow.errors import CloudApiError, Code, UsageError

_KEYS: Final = "ssh-keys"
_DEADLINE_S: Final = 300.0


def public_key(key_file: str) -> str:
    """The public part of a key pair.

    Raises:
        UsageError: If there is none.
    """
    path = Path(f"{key_file}.pub").expanduser()
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise UsageError(
            f"there is no public key {path}; make one with: ssh-keygen -f {key_file}"
        ) from None


def propagate(
    client: CloudClient, place: Place, node_ids: Iterable[str], user: str, key: str
) -> list[str]:
    """Has the hosts of nodes let a user in with a key.

    Args:
        client: Of the API.
        place: Where the nodes are.
        node_ids: Which.
        user: The account.
        key: The public key.

    Returns:
        The nodes that did not have it.

    Raises:
        CloudApiError: If the API refuses.
        WaitTimeout: If a node is not changed in time.
    """
    entry = f"{user}:{key}"
    operations = {}
    for node_id in node_ids:
        # The metadata is replaced as a whole.
        metadata = dict(client.node(place, node_id).get("metadata", {}))
        keys = [line for line in metadata.get(_KEYS, "").splitlines() if line.strip()]
        if entry not in keys:
            metadata[_KEYS] = "\n".join([*keys, entry])
            with _others_go_first():
                operations[node_id] = client.patch_node(place, node_id, {"metadata": metadata})
    for operation in operations.values():
        with _others_go_first():
            client.wait(operation, _DEADLINE_S)
    return list(operations)


@contextlib.contextmanager
def _others_go_first() -> Iterator[None]:
    """A node that is being changed by somebody else may have the key already: ssh will tell."""
    try:
        yield
    except CloudApiError as error:
        if error.code is not Code.ABORTED:
            raise
