"""The command line of `regrow run`: where its own options end and what it is to run begins."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal, final

import click

from regrow.errors import UsageError


@final
@dataclass(frozen=True, slots=True)
class Task:
    """What is to be run.

    Attributes:
        kind: How it was given.
        name: The script, module or command.
        arguments: What follows it, untouched.
    """

    kind: Literal["script", "module", "command"]
    name: str
    arguments: tuple[str, ...]

    def argv(self) -> list[str]:
        """The command line that runs it.

        Raises:
            UsageError: If there is no such script, module or command.
        """
        match self.kind:
            case "module":
                _check_module(self.name)
                return [sys.executable, "-m", self.name, *self.arguments]
            case "script":
                _check_script(Path(self.name), self.name)
                return [sys.executable, self.name, *self.arguments]
            case "command":
                program = shutil.which(self.name)
                if program is None:
                    raise UsageError(f"there is no command {self.name!r}")
                return [program, *self.arguments]

    def __str__(self) -> str:
        flag = "-m " if self.kind == "module" else ""
        return f"{flag}{self.name}"


def _check_script(path: Path, name: str) -> None:
    if not path.exists():
        raise UsageError(f"there is no script {name!r}")
    if path.is_dir() and not Path(path, "__main__.py").exists():
        raise UsageError(f"{name!r} is a directory without a __main__.py, and no script")


def _check_module(name: str) -> None:
    """Finds a module as `python -m` would, without importing its packages, which is user code."""
    found, path = None, [str(Path.cwd()), *sys.path]
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        found = _find(".".join(parts[:count]), path)
        if found is None:
            raise UsageError(f"there is no module {name!r}")
        path = list(found.submodule_search_locations or ())
    if path and _find(f"{name}.__main__", path) is None:
        raise UsageError(f"module {name!r} is a package without a __main__, and cannot be run")


def _find(name: str, path: list[str]) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


class TaskCommand(click.Command):
    """A command whose options are followed by `SCRIPT | -m MODULE | -- COMMAND` and arguments.

    What is to be run is given to the command's function as its parameter `task`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Splits off what is to be run before click looks at the rest."""
        own, task = _split(args, self._takes_value())
        rest = super().parse_args(ctx, own)
        if task is None and not ctx.resilient_parsing:
            raise click.UsageError("nothing to run: give SCRIPT, -m MODULE or -- COMMAND", ctx)
        ctx.params["task"] = task
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Adds what is to be run to the line of usage."""
        return [*super().collect_usage_pieces(ctx), "(SCRIPT | -m MODULE | -- COMMAND) [ARGS]..."]

    def _takes_value(self) -> dict[str, bool]:
        return {
            name: not (parameter.is_flag or parameter.count)
            for parameter in self.params
            if isinstance(parameter, click.Option)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }


def _split(arguments: Sequence[str], takes_value: dict[str, bool]) -> tuple[list[str], Task | None]:
    own: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return own, _task("command", rest, "-- needs a command after it")
        if word == "-m":
            return own, _task("module", rest, "-m needs the name of a module after it")
        if not word.startswith("-") or word == "-":
            return own, Task("script", word, tuple(rest))
        own.append(word)
        if takes_value.get(word, False) and rest:
            own.append(rest.pop(0))
    return own, None


def _task(kind: Any, rest: list[str], otherwise: str) -> Task:
    if not rest:
        raise click.UsageError(otherwise)
    return Task(kind, rest[0], tuple(rest[1:]))
