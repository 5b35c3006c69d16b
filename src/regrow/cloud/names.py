"""Names of resources: `projects/P/locations/Z/COLLECTION/ID`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, final

from regrow.errors import CloudApiError, Code

_ID: Final = re.compile(r"[A-Za-z0-9_.~+%-]{1,128}")
"""Google's own rule for queuedResourceId, nodeId and nodeIdPrefix."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where a resource is.

    Attributes:
        project: Id or number of a project.
        zone: A zone.
    """

    project: str
    zone: str

    @property
    def name(self) -> str:
        """As it stands in names."""
        return f"projects/{self.project}/locations/{self.zone}"

    def child(self, collection: str, id: str) -> str:  # noqa: A002 - the API's own word
        """Name of a resource here."""
        return f"{self.name}/{collection}/{id}"

    @classmethod
    def of(cls, name: str) -> Place:
        """The place of a resource, or the place that is named itself."""
        _, project, _, zone, *_ = name.split("/")
        return cls(project, zone)


def base(name: str) -> str:
    """The last part of a name."""
    return name.rpartition("/")[2]


def check_id(field: str, id: str) -> str:  # noqa: A002
    """Returns an id that may be given to a resource.

    Raises:
        CloudApiError: INVALID_ARGUMENT if it may not.
    """
    if not _ID.fullmatch(id) or id in {".", ".."}:
        raise CloudApiError(
            Code.INVALID_ARGUMENT,
            f"Invalid value at '{field}': {id!r} does not match the pattern {_ID.pattern}.",
        )
    return id
