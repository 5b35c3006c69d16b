"""Shell commands: whether their processes may wait for each other, and how they are left behind."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from typing import Final

_OPERATORS: Final = frozenset({";", "&", "&&", "|", "||", "(", ")", "\n"})
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_REDIRECTION: Final = re.compile(r"\d*[<>]&[\d-]|&>>?")
_PYTHON: Final = re.compile(r"(python|pypy)[\d.]*")
_LAUNCHERS: Final = frozenset({"torchrun", "accelerate", "mpirun", "xla_dist", "jupyter"})
_SHELLS: Final = frozenset({"sh", "bash", "zsh", "source", "."})
_PREFIXES: Final = frozenset({"sudo", "exec", "env", "time", "nohup", "nice", "setsid"})
_LONE_MODULES: Final = frozenset({"pip", "venv", "ensurepip", "compileall"})
_LONE_FLAGS: Final = frozenset({"--version", "-V", "--help", "-h"})

BACKGROUND_LOG: Final = "regrow-background.log"
"""In the home directory of each host: what commands that were left behind have printed."""


def may_wait_for_others(command: str) -> bool:
    """Whether a command may wait for the same command on other hosts, as distributed JAX does.

    Programs in Python (but not pip and its like), scripts and launchers may; one that is left in
    the background does not hold anybody up. A guess from the words: it errs towards True for
    programs, towards False for all else.
    """
    return any(_may_wait(words) for words, end in _simple_commands(command) if end != "&")


def _simple_commands(command: str) -> Iterator[tuple[list[str], str]]:
    """The words of each simple command, and the operator behind it."""
    # The "&" of a redirection is no operator.
    lexer = shlex.shlex(_REDIRECTION.sub(" ", command), posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace = " \t\r"
    lexer.commenters = ""
    words: list[str] = []
    try:
        for token in lexer:
            if token in _OPERATORS:
                yield words, token
                words = []
            else:
                words.append(token)
    except ValueError:
        # An open quote: a shell will refuse it.
        pass
    yield words, ""


def _may_wait(words: list[str]) -> bool:
    while words and (
        words[0] in _PREFIXES or _ASSIGNMENT.fullmatch(words[0]) or words[0].startswith("-")
    ):
        words = words[1:]
    if not words:
        return False
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if _PYTHON.fullmatch(program):
        modules = [b for a, b in itertools.pairwise(arguments) if a == "-m"]
        return not (_LONE_MODULES & set(modules) or _LONE_FLAGS & set(arguments[:1]))
    is_script = program.endswith((".py", ".sh")) or (program in _SHELLS and bool(arguments))
    return is_script or program in _LAUNCHERS


def in_background(command: str) -> str:
    """The command, left behind on the host: it goes on when the connection has ended."""
    return (
        f'nohup sh -c {shlex.quote(command)} </dev/null >>"$HOME"/{BACKGROUND_LOG} 2>&1 & '
        f'echo "process $!, output in ~/{BACKGROUND_LOG}"'
    )
