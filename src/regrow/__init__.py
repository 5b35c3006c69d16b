"""Stock JAX over slices that are separate processes and may die and return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.client.connect import connect
    from regrow.cluster import LocalCluster
    from regrow.elastic.causes import explain

__version__ = "0.1.0"
__all__ = ["LocalCluster", "__version__", "connect", "explain"]

# Every process of a cluster imports this package; it must cost nothing.
_HOMES = {
    "LocalCluster": "regrow.cluster",
    "connect": "regrow.client.connect",
    "explain": "regrow.elastic.causes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'regrow' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
