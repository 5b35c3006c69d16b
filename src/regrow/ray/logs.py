"""What jobs print, kept here while they run: Ray has no logs of nodes that have died."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, final

from regrow.errors import NoClusterError
from regrow.processes import tail
from regrow.ray.cluster import RayCluster

_END_S: Final = 5.0
_RETRY_S: Final = 0.5
_RETRIES: Final = 20
TellLine = Callable[[int, str], None]


@final
class LogKeeper:
    """Follows the logs of jobs on a thread of its own, into one file for each rank."""

    def __init__(self, cluster: RayCluster, directory: Path, tell: TellLine | None = None) -> None:
        """Begins with nothing.

        Args:
            cluster: Whose jobs.
            directory: Where the files are made; it may be there already.
            tell: Is given each line with its rank.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._cluster = cluster
        self._directory = directory
        self._tell = tell
        self._following: list[Future[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ray-logs", daemon=True)
        self._thread.start()

    def __enter__(self) -> LogKeeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, rank: int) -> Path:
        """The file of a rank."""
        return self._directory / f"rank-{rank}.log"

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank."""
        return tail(self.path(rank), lines=40)

    def follow(self, rank: int, job_id: str) -> None:
        """Begins to follow a job."""
        course = self._follow(rank, job_id)
        self._following.append(asyncio.run_coroutine_threadsafe(course, self._loop))

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Adds what a rank that never ran could not print."""
        with self.path(rank).open("a", encoding="utf-8") as file:
            self._take(rank, "".join(f"{line}\n" for line in lines), file.write)

    def settle(self, timeout_s: float) -> None:
        """Waits for the rest of jobs that have ended, all in all so long."""
        deadline = time.monotonic() + timeout_s
        for future in self._following:
            with contextlib.suppress(Exception):
                future.result(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stops following."""
        for future in self._following:
            future.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        rest = asyncio.all_tasks(self._loop)
        for task in rest:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _follow(self, rank: int, job_id: str) -> None:
        with self.path(rank).open("w", encoding="utf-8", buffering=1) as file:
            seen = 0
            for _ in range(_RETRIES):
                # What was read before a connection broke is sent again from the beginning.
                skip = seen
                try:
                    async for text in self._cluster.follow(job_id):
                        fresh = text[min(skip, len(text)) :]
                        skip -= len(text) - len(fresh)
                        seen += len(fresh)
                        self._take(rank, fresh, file.write)
                    return
                except NoClusterError:
                    await asyncio.sleep(_RETRY_S)
                except Exception as error:  # noqa: BLE001 - of Ray; whoever reads the log is told
                    file.write(f"regrow: this log cannot be followed: {error!r}\n")
                    return

    def _take(self, rank: int, text: str, write: Callable[[str], object]) -> None:
        write(text)
        if self._tell is not None:
            for line in text.splitlines():
                self._tell(rank, line)
