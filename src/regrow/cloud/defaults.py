"""Project and zone that commands take when they are given none: `regrow config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, final

from regrow.cloud.hosts.spec import write_file
from regrow.errors import RegrowError, UsageError
from regrow.home import Home

PROPERTIES: Final = ("project", "zone")
_FILE: Final = "cloud-defaults.json"
# As gcloud calls them.
_SECTIONS: Final = {"core/project": "project", "compute/zone": "zone"}


@final
class Defaults:
    """The values that are kept in REGROW_HOME."""

    def __init__(self, home: Path | None = None) -> None:
        """Names the directory; default: REGROW_HOME."""
        self._path = (home or Home().path) / _FILE

    def all(self) -> dict[str, str]:
        """What is set.

        Raises:
            RegrowError: If the file cannot be read.
        """
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RegrowError(f"cannot read {self._path}: {error}") from None
        if not isinstance(values, dict):
            raise RegrowError(f"{self._path} holds no properties; remove it")
        return {name: str(values[name]) for name in PROPERTIES if name in values}

    def set(self, name: str, value: str | None) -> None:
        """Sets a property, or with None unsets it."""
        values = self.all()
        values.pop(name, None)
        if value is not None:
            values[name] = value
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(self._path, json.dumps(values))

    def require(self, name: str, given: str | None) -> str:
        """What a flag was given, or the property.

        Raises:
            UsageError: If there is neither.
        """
        value = given or self.all().get(name)
        if not value:
            raise UsageError(f"no {name}: give --{name}, or set it with: regrow config set {name}")
        return value


def property_name(name: str) -> str:
    """A property's name; gcloud's own (core/project, compute/zone) are taken, too.

    Raises:
        UsageError: If there is no such property.
    """
    name = _SECTIONS.get(name, name)
    if name not in PROPERTIES:
        raise UsageError(f"there is no property {name!r}; there are: {', '.join(PROPERTIES)}")
    return name
