"""Suspended state on storage: chunks by their hash, and the manifest that makes a snapshot of them.

    URL/JOB/chunks/<XXH3-128>          the bytes of one chunk
    URL/JOB/manifests/<number>.json    one snapshot: which arrays, which shards, which chunks

`manifest` and `sweep` have no I/O; `storage` is where bytes come from and go to; `snapshots` commits and
finds manifests; `shards` writes and reads the shards of a host.
"""

from regrow.suspend.manifest import ArrayEntry, Manifest, PartEntry, ShardEntry
from regrow.suspend.snapshots import Snapshots
from regrow.suspend.storage import Storage, open_storage

__all__ = [
    "ArrayEntry",
    "Manifest",
    "PartEntry",
    "ShardEntry",
    "Snapshots",
    "Storage",
    "open_storage",
]
