"""The program by which pathwaysutils moves arrays to other shardings."""

from __future__ import annotations

import base64
import json
from typing import Any, final

from regrow.errors import Code, StatusError
from regrow.wire import shardings
from regrow.wire.shardings import Sharding


@final
class Reshard:
    """One such program.

    Attributes:
        name: Its name.
        donate: Whether its arguments are given away.
        devices: Where its first argument is.
        targets: The sharding of each result.
    """

    def __init__(self, data: bytes) -> None:
        """Reads a plugin program: JSON behind a prefix.

        Raises:
            StatusError: It is none that is known.
        """
        self.name = "reshard"
        try:
            request = json.loads(data[data.index(b"{") :])["reshardRequest"]
            self.donate = bool(request["donateInput"])
            self.devices = [
                int(device) for device in request["inSharding"][0]["devices"]["device_ids"]
            ]
            self.targets = [_sharding(out) for out in request["outSharding"]]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise StatusError.user(
                Code.UNIMPLEMENTED,
                f"the plugin program {data[:80]!r} is not supported; resharding is",
            ) from None

    def unload(self) -> None:
        """There is nothing to let go of."""


def _sharding(told: dict[str, Any]) -> Sharding:
    return shardings.from_op_sharding(
        tuple(int(device) for device in told["devices"]["device_ids"]),
        told.get("memory_kind") or None,
        base64.b64decode(told["xla_hlo_sharding"]),
    )
