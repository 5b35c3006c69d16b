"""How the state of a slice comes back from storage: its new hosts read what the old ones have written."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from regrow.channel import commands as c
from regrow.head.asking import ask_all
from regrow.head.inventory import Inventory, saved_shards
from regrow.head.links import Link
from regrow.suspend import PartEntry
from regrow.suspend.shards import CHUNK_BYTES

LOAD_S: Final = 600.0


async def load(
    links: Sequence[Link],
    stored: Mapping[int, Mapping[int, PartEntry]],
    inventory: Inventory,
    url: str,
) -> None:
    """Gives the hosts of a slice what clients still have on them.

    Args:
        links: The hosts.
        stored: What was saved, by host and number of the buffer.
        inventory: What clients have.
        url: Where it was saved.

    Raises:
        StatusError: A host was lost, or could not read.
        WaitTimeout: It took too long.
    """
    questions = []
    confirmations = []
    for link in links:
        saved = stored[link.host]
        parts = [saved[aid] for aid in inventory.on_host(link.host) if aid in saved]
        _fail_parts(link, inventory, parts)
        whole = [(one.buffer, saved_shards(one)) for one in parts if one.error is None]
        questions.append((link, functools.partial(_question, url=url, parts=whole)))
        confirmations.append((link, functools.partial(c.Ready, aids=[aid for aid, _ in whole])))
    what = f"state to be read from {url}"
    await ask_all(questions, LOAD_S, what)
    # An answer may be the last that a host said, and then be read together with the news of its end.
    await ask_all(confirmations, LOAD_S, what)


def _fail_parts(link: Link, inventory: Inventory, parts: Sequence[PartEntry]) -> None:
    """Parts that held an error hold it again."""
    for part in parts:
        if part.error is None:
            continue
        placement = inventory.buffers[part.buffer].placement
        devices = [placement.devices[shard] for shard in placement.shards[link.host]]
        link.send(c.Expect(part.buffer, 0, devices, "device"))
        link.send(c.FillError(part.buffer, *part.error))


def _question(rid: int, *, url: str, parts: Sequence[Any]) -> c.LoadParts:
    return c.LoadParts(rid, url, CHUNK_BYTES, parts)
