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

    def __init__(self) -> None:
        self._folder = Home().path / "multihost" / "jobs"

    def remember(self, place: Place, run: str, bucket: str) -> None:
        """Writes down a job's bucket."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{place.project}-{place.zone}-{run}.json"
        fields = {"run": run, "project": place.project, "zone": place.zone, "bucket": bucket}
        write_file(path, json.dumps(fields))

    def bucket(self, run: str, project: str | None, zone: str | None) -> str | None:
        """The bucket of a job that was started from here; None if there is none.

        Args:
            run: Its name.
            project: Its project, if that is known.
            zone: Its zone, if that is known.

        Raises:
            UsageError: If there are several of that name.
        """
        wanted = {"run": run, "project": project, "zone": zone}
        found = [
            job
            for path in sorted(self._folder.glob("*.json"))
            if (job := _read(path))
            and all(job.get(key) == value for key, value in wanted.items() if value)
        ]
        places = [f"{job['project']} in {job['zone']}" for job in found]
        if len(found) > 1:
            raise UsageError(
                f"several jobs are called {run} ({', '.join(places)}): give --project and --zone"
            )
        return str(found[0]["bucket"]) if found else None


def _read(path: Path) -> dict[str, str]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) and "bucket" in fields else {}


def bucket_of_slices(client: CloudClient, place: Place, run: str) -> str:
    """The bucket of a job, as its slices know it.

    Raises:
        UsageError: If there are none.
    """
    try:
        specs = client.queued(place, run).get("tpu", {}).get("nodeSpec", [])
        return str(specs[0]["node"]["metadata"][BUCKET_KEY])
    except (CloudApiError, LookupError, TypeError):
        raise UsageError(
            f"no job {run} is known here, and {place.name} has no slices of it: "
            "give its --bucket, or the --project and --zone it was started in"
        ) from None
