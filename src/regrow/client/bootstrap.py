"""`python -m regrow.client.bootstrap (SCRIPT | -m MODULE) [ARGS…]`: runs a script as a client.

The cluster comes from REGROW_TARGET (and REGROW_TOKEN). The script runs as it would by itself: as
`__main__`, with its own `sys.argv` and `sys.path`, and with tracebacks that begin in it. Where the
environment of a process can be set, `regrow.client.environ` needs no such start.
"""

from __future__ import annotations

import builtins
import io
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from regrow.client.connect import connect
from regrow.errors import RegrowError

_USAGE: Final = "usage: python -m regrow.client.bootstrap (SCRIPT | -m MODULE) [ARGS…]"
_NOT_THE_SCRIPTS: Final = (__file__, runpy.__file__, "<frozen runpy>")


def main(arguments: Sequence[str]) -> int:
    """Runs the script; returns only where there is none to run, or it has ended by itself.

    Args:
        arguments: What stands behind the name of this module on the command line.

    Returns:
        The exit status: 0, or 2 for wrong usage.
    """
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        sys.stderr.write(f"{_USAGE}\n")
        return 2
    try:
        connect()
    except RegrowError as error:
        sys.stderr.write(f"regrow: {error}\n")
        return 2
    sys.excepthook = _without_our_frames
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        _emptied_main()
        # What `python -m` itself calls: unlike run_module it leaves the module in `__main__`.
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    else:
        _run_script(list(arguments))
    return 0


def _run_script(arguments: list[str]) -> None:
    script = arguments[0]
    path = Path(script)
    if path.is_dir() or (path.suffix != ".py" and _is_archive(path)):
        sys.argv = arguments
        runpy.run_path(script, run_name="__main__")
        return
    try:
        source = path.read_bytes()
    except OSError as error:
        sys.stderr.write(f"regrow: can't open {script!r}: {error.strerror}\n")
        sys.exit(2)
    sys.argv = arguments
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    namespace = _emptied_main()
    namespace["__file__"] = script
    namespace["__loader__"] = SourceFileLoader("__main__", script)
    exec(compile(source, script, "exec", dont_inherit=True), namespace)  # noqa: S102 (the user's own)


def _is_archive(path: Path) -> bool:
    with io.open_code(str(path)) if path.is_file() else io.BytesIO() as file:
        return file.read(4) == b"PK\x03\x04"


def _emptied_main() -> dict[str, Any]:
    """The names of the real `__main__`: pickle and multiprocessing look for the script's there."""
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(
        __name__="__main__",
        __builtins__=builtins,
        __loader__=None,
        __spec__=None,
        __package__=None,
        __doc__=None,
    )
    return namespace


def _without_our_frames(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    start = trace
    while start is not None and start.tb_frame.f_code.co_filename in _NOT_THE_SCRIPTS:
        start = start.tb_next
    start = start or trace
    # The interpreter prints the traceback that the exception itself carries.
    sys.__excepthook__(kind, error.with_traceback(start), start)


if __name__ == "__main__":
    from regrow.client import bootstrap  # noqa: PLW0406

    # From the imported module: the names of this one are about to become the script's.
    sys.exit(bootstrap.main(sys.argv[1:]))
