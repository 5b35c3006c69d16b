"""Where the jobs that were started from here have their buckets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, final

from regrow.cloud.client import CloudClient
from regrow.cloud.hosts.spec import write_file
from regrow.cloud.names import Place
from regrow.errors import CloudApiError, UsageError
from regrow.home import Home

BUCKET_KEY: Final = "regrow-bucket"
"""Metadata of the slices of a job."""


@final
class KnownJobs:
    """The jobs that REGROW_HOME knows of."""

    def __init__(self, home: Path | None = None) -> None:
        """Names the directory; default: REGROW_HOME."""
        self._folder = (home or Home().path) / "multihost" / "jobs"

    def _path(self, place: Place, run: str) -> Path:
        return self._folder / f"{place.project}-{place.zone}-{run}.json"

    def remember(self, place: Place, run: str, bucket: str) -> None:
        """Writes down a job's bucket."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(self._path(place, run), json.dumps({"bucket": bucket}))

    def bucket(self, client: CloudClient, place: Place, run: str, given: str | None) -> str:
        """The bucket of a job: the given one, the one that is known here, or that of its slices.

        Raises:
            UsageError: If none is known.
        """
        if given:
            return given
        try:
            return str(json.loads(self._path(place, run).read_text(encoding="utf-8"))["bucket"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        try:
            specs = client.queued(place, run).get("tpu", {}).get("nodeSpec", [])
            return str(specs[0]["node"]["metadata"][BUCKET_KEY])
        except (CloudApiError, LookupError, TypeError):
            raise UsageError(
                f"no job {run} is known here, and {place.name} has no slices of it: "
                "give its --bucket, or the --project and --zone it was started in"
            ) from None
