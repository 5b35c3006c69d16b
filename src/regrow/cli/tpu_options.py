"""What the commands for TPUs share: where they look, what slices are to be like, how they wait."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from regrow.cli.report import say
from regrow.cloud.bodies import NodeRequest, parse_duration, parse_pairs
from regrow.cloud.defaults import Defaults
from regrow.cloud.local import ENDPOINT_VARIABLE, connect
from regrow.cloud.names import Place
from regrow.errors import UsageError

if TYPE_CHECKING:
    from regrow.cloud.client import CloudClient

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Option = Callable[[Any], Any]

ALL_ZONES: Final = "-"
OPERATION_DEADLINE: Final = "30m"
TERMINATED_STATUS: Final = 128 + signal.SIGTERM


def _add(function: _Function, *options: _Option) -> _Function:
    decorated: Any = function
    for option in reversed(options):
        decorated = option(decorated)
    wrapped: _Function = decorated
    return wrapped


def duration(value: object) -> float:
    """Parses a duration as gcloud has it; seconds."""
    try:
        return parse_duration("duration", str(value))
    except UsageError:
        raise click.BadParameter(f"{value!r} is no duration like 3600s, 6h or 1d12h") from None


def at_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --project, --zone and --endpoint; the command is given `client` and `place` for them."""
    return _at(function, lambda defaults: defaults.require("zone", None))


def at_places(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for commands that take all zones where none is given."""
    return _at(function, lambda defaults: defaults.all().get("zone", ALL_ZONES))


def _at(function: Callable[..., Any], usual_zone: Callable[[Defaults], str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def command(
        *arguments: Any, project: str | None, zone: str | None, endpoint: str | None, **values: Any
    ) -> Any:
        defaults = Defaults()
        place = Place(defaults.require("project", project), zone or usual_zone(defaults))
        for name, value in (("project", place.project), ("zone", place.zone)):
            if "/" in value:
                raise UsageError(f"--{name}={value}: give the {name}'s id alone")
        client = connect(endpoint)
        with contextlib.closing(client):
            return function(*arguments, client=client, place=place, **values)

    return _add(
        command,
        click.option("--project", metavar="ID", help="Project.  [default: regrow config]"),
        click.option("--zone", metavar="ZONE", help="Zone.  [default: regrow config]"),
        click.option(
            "--endpoint",
            metavar="URL",
            help=f"The API.  [default: {ENDPOINT_VARIABLE}, or the local server, which is started]",
        ),
    )


def format_option(default: str) -> _Option:
    """`--format`."""
    return click.option(
        "--format",
        "form",
        default=default,
        show_default=True,
        metavar="table|yaml|json|value(KEY,…)",
        callback=_check_format,
        help="How it is printed.",
    )


def _check_format(_: click.Context, __: click.Parameter, value: str) -> str:
    if value not in ("table", "yaml", "json") and not value.startswith("value("):
        raise click.BadParameter(f"{value!r} is none of table, yaml, json and value(KEY,…)")
    return value


filter_option: Final = click.option(
    "--filter",
    "filter_",
    metavar="EXPRESSION",
    help="NAME, or KEY=VALUE, KEY:PART, KEY~REGEX, joined by AND.",
)
async_option: Final = click.option(
    "--async", "is_async", is_flag=True, help="Do not wait for the operation to end."
)
quiet_option: Final = click.option("--quiet", "-q", is_flag=True, help="Do not ask.")
timeout_option: Final = click.option(
    "--timeout",
    "timeout_s",
    type=duration,
    default=OPERATION_DEADLINE,
    show_default=True,
    metavar="DURATION",
    help="How long the operation may take.",
)


# --- what slices are to be like ---

# How a slice of a queued resource is paid for, the queued resource tells.
_NODE_FIELDS: Final = frozenset(NodeRequest.__dataclass_fields__) - {
    "spot",
    "preemptible",
    "reserved",
}


def node_options(function: _Function) -> _Function:
    """Adds the flags that say what each slice is to be like, but for its software and tier."""
    return _add(
        function,
        click.option("--accelerator-type", metavar="TYPE", help="Shape of a slice, v4-16 say."),
        click.option("--type", metavar="GENERATION", help="With --topology: v4, v5p, …"),
        click.option("--topology", metavar="AxBxC", help="With --type: 2x2x2, say."),
        click.option("--description", metavar="TEXT"),
        click.option("--network", default="default", show_default=True),
        click.option("--subnetwork"),
        click.option("--range", metavar="CIDR", help="Addresses of a slice."),
        click.option("--internal-ips", is_flag=True, help="No external addresses."),
        click.option("--service-account", metavar="EMAIL"),
        click.option("--scopes", metavar="SCOPE,…", default=""),
        click.option("--shielded-secure-boot", is_flag=True),
        click.option("--tags", metavar="TAG,…", default="", help="For firewalls."),
        click.option("--labels", metavar="KEY=VALUE,…", multiple=True),
        click.option(
            "--metadata",
            metavar="KEY=VALUE,…",
            multiple=True,
            help="startup-script=… runs on every start of a host.",
        ),
        click.option(
            "--metadata-from-file",
            metavar="KEY=FILE,…",
            multiple=True,
            help="The same, with values out of files.",
        ),
        click.option("--data-disk", metavar="source=…,mode=…", multiple=True),
        click.option(
            "--network-config",
            metavar="network=…,subnetwork=…",
            multiple=True,
            help="Once for each of several networks.",
        ),
        click.option("--boot-disk", metavar="kms-key=…,size-gb=…", default=""),
        click.option("--autocheckpoint-enabled", is_flag=True, help="v2alpha1."),
    )


def take_node(values: dict[str, Any]) -> NodeRequest:
    """Takes what says how slices are to be, but for their tier, out of a command's values.

    Raises:
        UsageError: If a value is wrong.
    """
    values["metadata"] = _metadata(values["metadata"], values.pop("metadata_from_file"))
    values["labels"] = parse_pairs("--labels", values["labels"])
    values["data_disks"] = tuple(
        parse_pairs("--data-disk", (text,)) for text in values.pop("data_disk")
    )
    values["network_configs"] = tuple(
        parse_pairs("--network-config", (text,)) for text in values.pop("network_config")
    )
    values["boot_disk"] = parse_pairs(
        "--boot-disk", (values["boot_disk"],) * bool(values["boot_disk"])
    )
    for name in ("tags", "scopes"):
        values[name] = tuple(one.strip() for one in values[name].split(",") if one.strip())
    return NodeRequest(**{name: values.pop(name) for name in list(values) if name in _NODE_FIELDS})


def _metadata(given: tuple[str, ...], files: tuple[str, ...]) -> dict[str, str]:
    metadata = parse_pairs("--metadata", given)
    for key, path in parse_pairs("--metadata-from-file", files).items():
        if key in metadata:
            raise UsageError(f"--metadata and --metadata-from-file both give {key}")
        try:
            metadata[key] = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--metadata-from-file: cannot read {path}: {error}") from None
    return metadata


# --- waiting ---


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM unwind the block as Ctrl-C does, so that it can take back what it began."""

    def end(*_: object) -> None:
        sys.exit(TERMINATED_STATUS)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def finish(
    client: CloudClient,
    operation: dict[str, Any],
    doing: str,
    done: str,
    *,
    is_async: bool,
    timeout_s: float,
) -> None:
    """Waits for an operation, unless it is to go on by itself, and tells of it.

    Raises:
        CloudApiError: The error that it has ended with.
        WaitTimeout: If it has not ended in time; it goes on.
    """
    say(f"{doing} (operation {operation['name'].rpartition('/')[2]})")
    if not is_async:
        client.wait(operation, timeout_s)
        say(done)


def confirm(text: str, *, quiet: bool) -> None:
    """Asks, if there is somebody to be asked; ends the command if the answer is no."""
    if not quiet and sys.stdin is not None and sys.stdin.isatty():
        click.confirm(f"{text} Do you want to continue?", default=True, abort=True, err=True)
