"""Faults for a cluster of this process, while it goes on with something else."""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Iterable
from typing import Final, final

from regrow.chaos.ability import check_possible
from regrow.chaos.inject import Injector
from regrow.chaos.schedule import FaultEvent, parse_schedule
from regrow.cluster import LocalCluster
from regrow.errors import RegrowError, WaitTimeout

logger = logging.getLogger("regrow.chaos")

_LOOK_S: Final = 0.02


@final
class Chaos:
    """The faults of a schedule, made on a cluster from the begin of the `with` block to its end.

        with regrow.LocalCluster(slices=3) as cluster, Chaos(cluster, "kill:1@step=3") as chaos:
            train(cluster)
        assert not chaos.left

    What lasts (a slow link, say) ends with the block. Times are counted from the moment a client
    connects, or from the begin of the block if one has connected before.
    """

    def __init__(self, cluster: LocalCluster, schedule: str | Iterable[FaultEvent]) -> None:
        """Checks a schedule.

        Args:
            cluster: The cluster.
            schedule: In the language of `--chaos`, or parsed.

        Raises:
            UsageError: It is no schedule, or one of its faults cannot be made here.
        """
        if isinstance(schedule, str):
            schedule = parse_schedule(schedule, cluster.config.slices)
        self._events = tuple(schedule)
        check_possible(self._events, ray=cluster.config.ray is not None)
        self._cluster = cluster
        self._injector: Injector | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Chaos:
        cluster = self._cluster
        self._injector = Injector(cluster.config, cluster.head_pid, self._events, logger.warning)
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(
            target=self._run, args=(self._injector,), name="regrow-chaos", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        assert self._injector is not None
        os.close(self._stop)
        self._thread.join()
        os.close(self._wake)
        self._injector.close()

    @property
    def done(self) -> tuple[FaultEvent, ...]:
        """The faults that were made, in their order."""
        return () if self._injector is None else tuple(self._injector.done)

    @property
    def refused(self) -> tuple[tuple[FaultEvent, str], ...]:
        """Those that could not be made, with the reason (a slice that was lost already, say)."""
        return () if self._injector is None else tuple(self._injector.refused)

    @property
    def left(self) -> tuple[FaultEvent, ...]:
        """Those whose moment has not come."""
        return self._events if self._injector is None else self._injector.left

    def wait(self, timeout_s: float) -> None:
        """Waits until no fault is left.

        Raises:
            WaitTimeout: Some are, at the deadline; says which.
        """
        deadline = time.monotonic() + timeout_s
        while self.left:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, self.left))
                raise WaitTimeout(f"the moment of these faults: {names}", timeout_s)
            time.sleep(_LOOK_S)

    def _run(self, injector: Injector) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(injector, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                at = injector.next_at
                wait_s = None if at is None else max(0.0, at - time.monotonic())
                if any(key.fileobj == self._wake for key, _ in selector.select(wait_s)):
                    return
                try:
                    injector.step()
                except RegrowError as error:
                    logger.warning("chaos ends: %s", error)
                    return
