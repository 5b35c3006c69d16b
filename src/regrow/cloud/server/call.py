"""One call of a method of the API, and the table of methods that it is looked up in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, final

from regrow.cloud.machine.admission import check_zone
from regrow.cloud.names import Place
from regrow.cloud.resources import ApiVersion, Node, Operation, QueuedResource
from regrow.cloud.server.decode import boolean, parse_body, parse_query
from regrow.cloud.server.engine import Engine
from regrow.cloud.server.filters import parse_filter
from regrow.cloud.server.pages import page
from regrow.cloud.server.partial import partial
from regrow.cloud.server.render import Renderer
from regrow.errors import CloudApiError, Code

VERSIONS: Final[dict[str, ApiVersion]] = {"v2": "v2", "v2alpha1": "v2alpha1"}
ALPHA: Final[tuple[ApiVersion, ...]] = ("v2alpha1",)
ZONE: Final = "projects/*/locations/*"
PAGED: Final = ("pageSize", "pageToken")
_SEGMENT: Final = r"([^/:]+)"
_Record = TypeVar("_Record", Node, QueuedResource, Operation)


@final
@dataclass(frozen=True, slots=True)
class Call:
    """What a client asks.

    Attributes:
        engine: Whom it asks.
        renderer: How records are shown.
        version: By which version of the API.
        path: The name in the URL, without version and verb.
        words: The variable parts of the path.
        query: Its parameters, in camelCase.
        body: Its message.
    """

    engine: Engine
    renderer: Renderer
    version: ApiVersion
    path: str
    words: tuple[str, ...]
    query: Mapping[str, str]
    body: dict[str, Any]

    @property
    def place(self) -> Place:
        """The place that the path begins with."""
        return Place(self.words[0], self.words[1])

    @property
    def ints(self) -> bool:
        """Whether enums are to be told by number."""
        return "enum-encoding=int" in self.query.get("$alt", "")

    @property
    def force(self) -> bool:
        """Whether the nodes are to be deleted as well."""
        return boolean(self.query, "force")

    @property
    def request_id(self) -> str:
        """The client's own id of the request."""
        return self.query.get("requestId", "")

    def operation(self, operation: Operation) -> dict[str, Any]:
        """Shows an operation."""
        return self.renderer.operation(operation, self.version, ints=self.ints)

    def do(self, request: Callable[[float], Operation]) -> dict[str, Any]:
        """Has it done, and shows the operation."""
        return self.operation(self.engine.do(request))

    def places(self) -> list[Place]:
        """The places that a list is about: the zone "-" means all of them.

        Raises:
            CloudApiError: NOT_FOUND, if there is no such zone.
        """
        config = self.engine.plane.config
        if self.place.zone == "-":
            return [Place(self.place.project, zone) for zone in config.zones]
        check_zone(config, self.place)
        return [self.place]

    def listed(
        self, field: str, items: Iterable[tuple[int, Any]], show: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """A page of a list, in the envelope that all lists have."""
        text = self.query.get("filter", "").strip()
        if text:
            holds = parse_filter(text)
            shown = ((number, show(one)) for number, one in items)
            kept = [(number, one) for number, one in shown if holds(one)]
            taken, more = page(kept, self.query)
            return {field: taken, **more}
        taken, more = page(list(items), self.query)
        return {field: [show(one) for one in taken], **more}

    def listed_records(
        self, field: str, records: Iterable[_Record], show: Callable[[_Record], Any]
    ) -> dict[str, Any]:
        """A page of the records that are in the places of the list."""
        places = self.places()
        return self.listed(field, ((one.seq, one) for one in records if one.place in places), show)

    def listed_here(
        self, field: str, names: Iterable[str], show: Callable[[str, Place], Any]
    ) -> dict[str, Any]:
        """A page of what is the same in every zone."""
        rows = [(name, place) for place in self.places() for name in names]
        return self.listed(field, enumerate(rows), lambda row: show(*row))


Handler = Callable[[Call], Any]


@final
@dataclass(frozen=True, slots=True)
class Method:
    """A method of the API.

    Attributes:
        http: Its HTTP method.
        pattern: Its path: "*" is one variable part.
        handler: What does it.
        query: Parameters beside those of all methods.
        body: The message that it takes.
        versions: Which versions have it.
    """

    http: str
    pattern: str
    handler: Handler
    query: Sequence[str] = ()
    body: str = "Empty"
    versions: Sequence[ApiVersion] = ("v2", "v2alpha1")

    def match(self, path: str) -> tuple[str, ...] | None:
        """The variable parts of a path, if it is of this method."""
        pattern = re.escape(self.pattern).replace(r"\*", _SEGMENT)
        found = re.fullmatch(pattern, path)
        return None if found is None else found.groups()


def find(
    methods: Iterable[Method], http: str, version: str, path: str
) -> tuple[Method, tuple[str, ...]]:
    """The method of a request, and the variable parts of its path.

    Raises:
        CloudApiError: NOT_FOUND, or UNIMPLEMENTED for a method of the other version.
    """
    elsewhere = False
    for method in methods:
        words = method.match(path)
        if words is None or method.http != http or version not in VERSIONS:
            continue
        if version in method.versions:
            return method, words
        elsewhere = True
    if elsewhere:
        raise CloudApiError(
            Code.UNIMPLEMENTED, f"{http} {path} is a method of v2alpha1, not of v2."
        )
    raise CloudApiError(Code.NOT_FOUND, f"Method not found: {http} /{version}/{path}")


def perform(
    methods: Iterable[Method],
    engine: Engine,
    renderer: Renderer,
    http: str,
    path: str,
    pairs: Iterable[tuple[str, str]],
    body: bytes,
) -> Any:
    """Answers a request.

    Args:
        methods: The methods that there are.
        engine: Whom they ask.
        renderer: How records are shown.
        http: The HTTP method.
        path: The path, with the version.
        pairs: The query parameters.
        body: The body.

    Raises:
        CloudApiError: The answer, if it is a refusal.
    """
    version, _, rest = path.lstrip("/").partition("/")
    method, words = find(methods, http, version, rest)
    query = parse_query(pairs, method.query)
    message = parse_body(body, method.body)
    name, _, _ = rest.partition(":")
    call = Call(engine, renderer, VERSIONS[version], name, words, query, message)
    answer = method.handler(call)
    return partial(answer, query["fields"]) if query.get("fields") else answer
