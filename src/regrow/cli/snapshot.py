"""`regrow snapshot`: what is in the state of suspended slices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from regrow.cli.report import count, say
from regrow.suspend.export import Held, export, find, held, verify
from regrow.suspend.manifest import Manifest

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SHOWN: Final = 40


def _which(function: _Function) -> _Function:
    chosen = click.option(
        "--number", type=click.IntRange(min=1), help="Which.  [default: the latest]"
    )
    place = click.argument("path", metavar="PATH")
    return place(chosen(function))


@click.group("snapshot")
def command() -> None:
    """Show or export the state of suspended slices.

    PATH is what `regrow suspend` told: a directory, or a URL that fsspec knows.
    """


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


def _head_lines(url: str, numbers: list[int], manifest: Manifest) -> list[str]:
    when = datetime.fromtimestamp(manifest.when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    topology = manifest.topology
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    chunks = set(manifest.chunks())
    return [
        f"snapshot {manifest.number} of {manifest.job} at {url} (there: "
        f"{', '.join(map(str, numbers))})",
        f"made {when}: {manifest.why}; {versions}",
        f"slices {', '.join(map(str, manifest.slices))} of {topology['slices']} with "
        f"{topology['devices_per_slice']} devices on {count(topology['hosts_per_slice'], 'host')} each",
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
    hashes = f", sha256 {first.chunks[0][:12]}…" if first.chunks else ""
    kind = f", {first.memory_kind}" if first.memory_kind != "device" else ""
    part = "" if one.whole else "; partly"
    return f"{text}; {one.nbytes} bytes{kind}{hashes}{part}"
