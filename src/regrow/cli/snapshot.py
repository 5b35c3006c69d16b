"""`regrow snapshot`: what is in the state of suspended slices, and how long it stays."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from regrow.cli.report import count, say
from regrow.errors import ClusterError, StorageError, UsageError
from regrow.home import Home
from regrow.start import suspended_of, sweep_suspended
from regrow.suspend.abandoned import abandoned
from regrow.suspend.export import Held, export, find, held, jobs_at, verify
from regrow.suspend.manifest import Manifest
from regrow.suspend.retention import Retention, days_of, retention_from
from regrow.suspend.snapshots import FOLDERS, Snapshots
from regrow.suspend.storage import open_storage

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SHOWN: Final = 40


def _days(value: object) -> float | None:
    """Parses a number of days, or "never" (None)."""
    try:
        return None if value is None else days_of(str(value))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no number of days, nor 'never'") from None


def _which(function: _Function) -> _Function:
    chosen = click.option(
        "--number", type=click.IntRange(min=1), help="Which.  [default: the latest]"
    )
    place = click.argument("path", metavar="PATH")
    return place(chosen(function))


@click.group("snapshot")
def command() -> None:
    """Show, export or remove the state of suspended slices.

    PATH is what `regrow suspend` told: a directory, or a URL that fsspec knows.
    """


@command.command("list")
@click.argument("place", metavar="[PLACE]", required=False)
def list_(place: str | None) -> None:
    """List the latest snapshots of all jobs in REGROW_HOME, or at the path or URL PLACE.

    Of those of clusters that are gone it tells which the next sweep removes. Nothing is ever swept
    elsewhere than in REGROW_HOME.
    """
    at_home, owned = suspended_of(Home())
    storage = open_storage(place or str(at_home))
    jobs, here = jobs_at(storage), owned()
    going: Collection[str] = ()
    if storage.url == open_storage(str(at_home)).url:
        rule = retention_from(os.environ)
        going = {path.name for path in abandoned(at_home, owned).expired(rule, time.time())}
    for name, store in jobs.items():
        use = "in use" if name in here else "next sweep removes it" if name in going else "stays"
        print(f"{store.url}: {_latest(store)}; {use}")
    if not jobs:
        say(f"there is no snapshot at {storage.url}")


@command.command("rm")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
def remove(paths: tuple[str, ...]) -> None:
    """Remove all snapshots of jobs whose clusters are gone."""
    stores = [_removable(path) for path in paths]
    for store in stores:
        store.clear()
        say(f"{store.url} is removed")


@command.command()
@click.option(
    "--days",
    type=_days,
    metavar="DAYS|never",
    help="How long they stay for their own sake.  [default: REGROW_SNAPSHOT_DAYS, else 30]",
)
@click.option(
    "--latest",
    type=click.IntRange(min=0),
    default=Retention().latest,
    show_default=True,
    help="How many of each cluster's name stay however old they are.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@click.pass_context
def sweep(ctx: click.Context, days: float | None, latest: int, dry_run: bool) -> None:
    """Remove old snapshots that clusters which are gone have left in REGROW_HOME.

    Each start of a cluster does the same with the defaults.
    """
    if ctx.get_parameter_source("days") is ParameterSource.DEFAULT:
        days = retention_from(os.environ).days
    home, rule = Home(), Retention(days, latest)
    if dry_run:
        removed: Sequence[Path] = abandoned(*suspended_of(home)).expired(rule, time.time())
    else:
        removed = sweep_suspended(home, rule).removed
    for path in removed:
        print(path)
    say(f"{count(len(removed), 'folder')} {'would be ' if dry_run else ''}removed")


@command.command()
@_which
@click.option("--json", "as_json", is_flag=True, help="The manifest itself.")
@click.option("--verify", "check", is_flag=True, help="Read all chunks and check their hashes.")
@click.option("--arrays", "every", is_flag=True, help="All arrays, not only the first.")
def show(path: str, number: int | None, as_json: bool, check: bool, every: bool) -> None:
    """Show the arrays of a snapshot: shapes, types, shardings, hashes; when and why it was made."""
    store = find(path)
    manifest = store.read(number)
    chunks = verify(store, manifest) if check else None
    if as_json:
        print(json.dumps(dataclasses.asdict(manifest), indent=1))
        return
    for line in _head_lines(store.url, store.numbers(), manifest):
        print(line)
    shown = list(held(manifest))
    for one in shown if every else shown[:_SHOWN]:
        print(_line(one))
    if not every and len(shown) > _SHOWN:
        print(f"  and {len(shown) - _SHOWN} more (--arrays shows all)")
    if chunks is not None:
        print(f"all {count(chunks, 'chunk')} are as they were written")


@command.command()
@_which
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def load(path: str, number: int | None, directory: Path) -> None:
    """Write the arrays of a snapshot to DIRECTORY as .npy files, with an index.json.

    So a new run can go on from what a suspended one has left, also when its head is gone.
    """
    store = find(path)
    manifest = store.read(number)
    written, left = export(store, manifest, directory)
    say(f"{count(written, 'array')} of snapshot {manifest.number} written to {directory}")
    if left:
        say(f"{count(left, 'array')} not: in errors, strings, or partly on slices that went on")


def _removable(path: str) -> Snapshots:
    storage = open_storage(path)
    store = Snapshots(storage)
    if not store.numbers():
        raise StorageError(f"there is no snapshot at {path}")
    if others := set(storage.names("")) - FOLDERS:
        raise UsageError(f"{path} has more than snapshots, such as {min(others)}: not removed")
    name = storage.url.rstrip("/").rpartition("/")[2]
    if name in suspended_of(Home())[1]():
        cluster = name.rpartition("-")[0]
        raise ClusterError(f"{path} is in use; first: regrow down --cluster {cluster}")
    return store


def _latest(store: Snapshots) -> str:
    try:
        manifest = store.read()
    except StorageError as error:
        return f"cannot be read ({error})"
    return (
        f"snapshot {manifest.number}, made {_moment(manifest.when)}: {manifest.why}; "
        f"{manifest.nbytes / 1e6:.1f} MB"
    )


def _moment(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _head_lines(url: str, numbers: list[int], manifest: Manifest) -> list[str]:
    topology = manifest.topology
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    chunks = set(manifest.chunks())
    return [
        f"snapshot {manifest.number} of {manifest.job} at {url} (there: "
        f"{', '.join(map(str, numbers))})",
        f"made {_moment(manifest.when)}: {manifest.why}; {versions}",
        f"slices {', '.join(map(str, manifest.slices))} of {topology['slices']} with "
        f"{count(topology['devices_per_slice'], 'device')} on {count(topology['hosts_per_slice'], 'host')} each",
        f"{count(len(manifest.arrays), 'array')}, {manifest.nbytes / 1e6:.1f} MB in "
        f"{count(len(chunks), 'different chunk')}",
    ]


def _line(one: Held) -> str:
    array = one.array
    dims = ",".join(map(str, array.shape))
    text = f"  client {array.session} array {array.handle}: {array.dtype}[{dims}], {array.sharding}"
    if one.error is not None:
        return f"{text}; raises {one.error[1][:100]}"
    first = next((shard for shard in one.shards if shard is not None), None)
    if first is None:
        return f"{text}; on slices that went on"
    hashes = f", XXH3 {first.chunks[0][:12]}…" if first.chunks else ""
    kind = f", {first.memory_kind}" if first.memory_kind != "device" else ""
    part = "" if one.whole else "; partly"
    return f"{text}; {one.nbytes} bytes{kind}{hashes}{part}"
