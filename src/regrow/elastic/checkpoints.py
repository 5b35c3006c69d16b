"""Checkpoints on disk beside snapshots in memory."""

from __future__ import annotations

import logging
from typing import Any

import jax

from regrow.elastic.causes import explain
from regrow.elastic.health import is_slice_down

_logger = logging.getLogger(__name__)


def settle_checkpoints(checkpoint_manager: Any) -> int | None:
    """After an elastic event: leaves only checkpoints that are complete.

    Waits for a save that is under way, forgives it if a lost slice made it fail, and has the manager
    look at its directory anew, so that `latest_step` is one that can be restored and the next save is
    taken. Suits `elastic_retry` as `on_elastic_event_callback`:

        on_elastic_event_callback=lambda: settle_checkpoints(checkpoint_manager)

    Args:
        checkpoint_manager: An `ocp.CheckpointManager`.

    Returns:
        The latest complete step; None if there is none.

    Raises:
        Exception: What made a save fail, if it was no lost slice (a full disk, say).
    """
    try:
        checkpoint_manager.wait_until_finished()
    except jax.errors.JaxRuntimeError as error:
        if not is_slice_down(error):
            raise
        _logger.warning("a checkpoint was not completed: %s", explain(error) or error)
    checkpoint_manager.reload()
    step: int | None = checkpoint_manager.latest_step()
    return step
