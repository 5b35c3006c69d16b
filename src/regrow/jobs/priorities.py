"""Priority classes, in Kubernetes' own form: a YAML of `PriorityClass` documents.

    kind: PriorityClass
    metadata:
      name: high-prior-job
    value: 2000
    globalDefault: false
    description: "This priority class should be used for high priority job."

The rules are those of Kubernetes' scheduling.k8s.io/v1: values up to a billion, names that do not
begin with `system-`, at most one global default; a job without a class has priority 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import yaml

from regrow.errors import UsageError

PreemptionPolicy = Literal["PreemptLowerPriority", "Never"]
HIGHEST_VALUE: Final = 1_000_000_000
LOWEST_VALUE: Final = -(2**31)
API_VERSION: Final = "scheduling.k8s.io/v1"

_NAME: Final = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
_RESERVED: Final = "system-"
_FIELDS: Final = frozenset(
    {
        "apiVersion",
        "kind",
        "metadata",
        "value",
        "globalDefault",
        "description",
        "preemptionPolicy",
    }
)


def check_object_name(name: object, what: str) -> str:
    """Returns `name` if Kubernetes takes it as a name (RFC 1123, lower case).

    Raises:
        UsageError: If it does not.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of {what}: use lower-case letters, digits, '-' and '.', "
            "beginning and ending with a letter or digit"
        )
    return name


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityClass:
    """A named priority.

    Attributes:
        name: What jobs call it by.
        value: The priority; a greater one goes first.
        global_default: Whether jobs that name no class are of this one.
        description: For people.
        preemption_policy: Whether its jobs may take slices from jobs of lower priority.
    """

    name: str
    value: int
    global_default: bool = False
    description: str = ""
    preemption_policy: PreemptionPolicy = "PreemptLowerPriority"

    def __post_init__(self) -> None:
        check_object_name(self.name, "a priority class")
        if self.name.startswith(_RESERVED):
            raise UsageError(f"priority class {self.name!r}: names in {_RESERVED!r} are reserved")
        if type(self.value) is not int or not LOWEST_VALUE <= self.value <= HIGHEST_VALUE:
            raise UsageError(
                f"priority class {self.name!r}: value is {self.value!r}; it must be a whole number "
                f"from {LOWEST_VALUE} to {HIGHEST_VALUE}"
            )
        if type(self.global_default) is not bool:
            raise UsageError(
                f"priority class {self.name!r}: globalDefault is {self.global_default!r}; "
                "it must be true or false"
            )
        if not isinstance(self.description, str):
            raise UsageError(f"priority class {self.name!r}: its description is no text")
        if self.preemption_policy not in ("PreemptLowerPriority", "Never"):
            raise UsageError(
                f"priority class {self.name!r}: preemptionPolicy is {self.preemption_policy!r}; "
                "it must be PreemptLowerPriority or Never"
            )

    @property
    def preempts(self) -> bool:
        """Whether its jobs may take slices from jobs of lower priority."""
        return self.preemption_policy == "PreemptLowerPriority"

    def to_manifest(self) -> dict[str, Any]:
        """The document that `parse_classes` and Kubernetes read."""
        document: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": "PriorityClass",
            "metadata": {"name": self.name},
            "value": self.value,
            "globalDefault": self.global_default,
        }
        if self.description:
            document["description"] = self.description
        if not self.preempts:
            document["preemptionPolicy"] = self.preemption_policy
        return document

    @classmethod
    def from_manifest(cls, document: object) -> PriorityClass:
        """Reads one document.

        Raises:
            UsageError: If it is none, or a field is unknown, missing or wrong.
        """
        if not isinstance(document, Mapping) or document.get("kind") != "PriorityClass":
            raise UsageError("a document is no PriorityClass (kind: PriorityClass)")
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        if name is None:
            raise UsageError("a PriorityClass has no metadata.name")
        unknown = sorted(str(key) for key in document.keys() - _FIELDS)
        if unknown:
            raise UsageError(f"priority class {name!r}: no such field: {', '.join(unknown)}")
        # The page's own example leaves the version out.
        if document.get("apiVersion", API_VERSION) != API_VERSION:
            raise UsageError(f"priority class {name!r}: apiVersion is not {API_VERSION}")
        if "value" not in document:
            raise UsageError(f"priority class {name!r} has no value")
        return cls(
            name=name,
            value=document["value"],
            global_default=document.get("globalDefault", False),
            description=document.get("description", ""),
            preemption_policy=document.get("preemptionPolicy", "PreemptLowerPriority"),
        )


NO_CLASS: Final = PriorityClass(name="none", value=0, description="Jobs that name no class.")


@final
class PriorityClasses:
    """The classes of a cluster."""

    def __init__(self, classes: Iterable[PriorityClass] = ()) -> None:
        """Takes them.

        Raises:
            UsageError: If two have one name, or two are the global default.
        """
        self._by_name: dict[str, PriorityClass] = {}
        for one in classes:
            if one.name in self._by_name:
                raise UsageError(f"there are two priority classes named {one.name!r}")
            self._by_name[one.name] = one
        defaults = [one for one in self._by_name.values() if one.global_default]
        if len(defaults) > 1:
            names = " and ".join(repr(one.name) for one in defaults)
            raise UsageError(f"the priority classes {names} are both the global default")
        self._default = defaults[0] if defaults else NO_CLASS

    def __iter__(self) -> Iterable[PriorityClass]:
        return iter(self._by_name.values())

    def find(self, name: str | None) -> PriorityClass:
        """The class of that name; None: that of jobs that name none.

        Raises:
            UsageError: If there is no such class.
        """
        if name is None:
            return self._default
        if name not in self._by_name:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise UsageError(f"there is no priority class {name!r}; the cluster has: {known}")
        return self._by_name[name]


def parse_classes(text: str, source: str = "the priority classes") -> PriorityClasses:
    """Reads a YAML of one or more `PriorityClass` documents, or a `List` of them.

    Args:
        text: The YAML.
        source: What errors call it.

    Raises:
        UsageError: If it is no YAML, or a class in it is wrong.
    """
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        raise UsageError(f"{source}: no YAML: {' '.join(str(error).split())}") from None
    items: list[object] = []
    for document in documents:
        if isinstance(document, Mapping) and str(document.get("kind")).endswith("List"):
            listed = document.get("items")
            items += listed if isinstance(listed, list) else []
        else:
            items.append(document)
    if not items:
        raise UsageError(f"{source}: there is no PriorityClass in it")
    try:
        return PriorityClasses(PriorityClass.from_manifest(item) for item in items)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def load_classes(path: Path) -> PriorityClasses:
    """Reads the classes of a file (see `parse_classes`).

    Raises:
        UsageError: If it cannot be read, is no YAML, or a class in it is wrong.
    """
    try:
        return parse_classes(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: no text: {error}") from None
