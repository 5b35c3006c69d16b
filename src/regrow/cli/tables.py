"""What commands print for people and for programs: tables as gcloud's, YAML, JSON; and filters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from regrow.errors import UsageError

Column = tuple[str, Callable[[dict[str, Any]], object]]
_TERM: Final = re.compile(r"([\w.]+)\s*(!=|=|:|~)\s*(.*)", re.DOTALL)


def print_list(items: Sequence[dict[str, Any]], columns: Sequence[Column], form: str) -> None:
    """Prints a list in one of the forms table, json and yaml."""
    if form == "json":
        click.echo(json.dumps(items, indent=2))
    elif form == "yaml":
        click.echo("\n".join(f"---\n{to_yaml(item)}" for item in items))
    elif form.startswith("value("):
        keys = [key.strip() for key in form.removeprefix("value(").removesuffix(")").split(",")]
        for item in items:
            click.echo("\t".join(_plain(_field(item, key, columns)) for key in keys))
    elif items:
        rows = [[title for title, _ in columns]]
        rows += [[_plain(value(item)) for _, value in columns] for item in items]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            click.echo("  ".join(cells).rstrip())
    else:
        click.echo("Listed 0 items.", err=True)


def print_one(item: dict[str, Any], form: str) -> None:
    """Prints one resource as yaml or json."""
    if form.startswith("value("):
        print_list([item], [], form)
    else:
        click.echo(json.dumps(item, indent=2) if form == "json" else to_yaml(item))


def to_yaml(value: dict[str, Any]) -> str:
    """A resource as YAML, in blocks."""
    # It takes a while to import, and few commands need it.
    import yaml

    return str(yaml.safe_dump(value, allow_unicode=True)).rstrip()


def _plain(value: object) -> str:
    if isinstance(value, Mapping | list):
        return json.dumps(value)
    return "" if value is None else str(value)


def _field(item: dict[str, Any], key: str, columns: Sequence[Column]) -> object:
    """A field by its path, or what the column of that name shows."""
    for title, value in columns:
        if title.lower() == key.lower():
            return value(item)
    found: Any = item
    for part in key.removesuffix(".basename()").split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def filtered(
    items: Sequence[dict[str, Any]], columns: Sequence[Column], text: str | None
) -> list[dict[str, Any]]:
    """Those that a filter lets through, as gcloud's `--filter` does on the client's side.

    Terms, joined by AND: WORD (in the name), KEY=VALUE, KEY!=VALUE, KEY:WORD (contained), KEY~REGEX;
    KEY is a column or the path of a field.

    Raises:
        UsageError: If a regular expression is none.
    """
    terms = re.split(r"\s+AND\s+", text.strip()) if text and text.strip() else []
    return [item for item in items if all(_matches(item, columns, term) for term in terms)]


def _matches(item: dict[str, Any], columns: Sequence[Column], term: str) -> bool:
    match = _TERM.fullmatch(term)
    if match is None:
        return term.strip("\"'").lower() in _plain(_field(item, "name", columns)).lower()
    key, operator, wanted = match[1], match[2], match[3].strip("\"'")
    shown = _plain(_field(item, key, columns))
    match operator:
        case "=":
            return shown == wanted
        case "!=":
            return shown != wanted
        case ":":
            return wanted.lower() in shown.lower()
    try:
        return re.search(wanted, shown) is not None
    except re.error as error:
        raise UsageError(f"--filter: {wanted!r} is no regular expression: {error}") from None
