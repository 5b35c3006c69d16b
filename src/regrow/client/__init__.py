"""The client's side: what a process that uses stock JAX needs to reach a cluster.

`connect` prepares the current process; `environ` gives the environment of a process that is yet to
start. Neither imports JAX: the hooks are installed when the script does.
"""

from __future__ import annotations

from regrow.client.connect import connect
from regrow.client.notice import ends_here
from regrow.client.settings import Settings, environ

__all__ = ["Settings", "connect", "ends_here", "environ"]
