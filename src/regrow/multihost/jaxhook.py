"""Has JAX find the other hosts of a local Multislice as soon as it is imported.

`regrow.client.site` calls it on hosts of the local Cloud TPU, whose environment has HOSTS_VARIABLE.
"""

from __future__ import annotations

import importlib.abc

from regrow.client.jaxhook import finder


def activate_from_environ() -> importlib.abc.MetaPathFinder:
    """What finds JAX's module, which is not imported yet, and installs the hooks into it."""
    return finder(_install)


def _install() -> None:
    from regrow.multihost import local_slices

    local_slices.install()
