"""`jax.profiler` traces the hosts of the cluster, too.

JAX's own profiler sees this process. The hosts are asked with the program that pathwaysutils uses for
that, and write their files beside this process's, into the same run of TensorBoard. Where
pathwaysutils has taken the profiler over (`pathwaysutils.initialize()`) it asks them itself; only its
demand that the directory be in a bucket of Google's is dropped for absolute paths.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from regrow.client.notice import say

_PATHWAYS: Final = "pathwaysutils.profiling"
_RUNTIME: Final = "proxy/regrow"

_lock = threading.Lock()
_remote: Any = None


def install() -> None:
    """Takes the place of `start_trace`, `stop_trace` and `trace` of `jax.profiler`."""
    public: Any = importlib.import_module("jax.profiler")
    private: Any = importlib.import_module("jax._src.profiler")
    start, stop = _start_trace(private.start_trace), _stop_trace(private.stop_trace)
    for module in (public, private):
        module.start_trace, module.stop_trace, module.trace = start, stop, _trace


def admit_directories() -> None:
    """Has pathwaysutils, if it is there, take absolute paths for traces."""
    profiling: Any = sys.modules.get(_PATHWAYS)
    stock = getattr(profiling, "_validate_gcs_bucket", None)
    if stock is None or getattr(stock, "regrow", False):
        return

    def validate(log_dir: str) -> None:
        if not Path(log_dir).is_absolute():
            stock(log_dir)

    validate.regrow = True  # type: ignore[attr-defined]
    profiling._validate_gcs_bucket = validate


def _start_trace(stock: Callable[..., Any]) -> Callable[..., Any]:
    def start_trace(
        log_dir: str | os.PathLike[str],
        create_perfetto_link: bool = False,
        create_perfetto_trace: bool = False,
        profiler_options: Any = None,
    ) -> Any:
        """As `jax.profiler.start_trace`; the hosts of the cluster are traced, too."""
        options = profiler_options
        if options is None:
            options = importlib.import_module("jax").profiler.ProfileOptions()
        if not options.session_id:
            options.session_id = time.strftime("%Y_%m_%d_%H_%M_%S")
        started = stock(log_dir, create_perfetto_link, create_perfetto_trace, options)
        if not _asked_by_pathways():
            _start_hosts(Path(log_dir).absolute(), options)
        return started

    return start_trace


def _stop_trace(stock: Callable[[], Any]) -> Callable[[], Any]:
    def stop_trace() -> Any:
        """As `jax.profiler.stop_trace`; the hosts of the cluster write their traces, too."""
        global _remote
        with _lock:
            remote, _remote = _remote, None
        try:
            # First, for JAX's file for Perfetto is made of the only trace that is there.
            return stock()
        finally:
            if remote is not None:
                _execute(remote, "the hosts' traces are not complete")

    return stop_trace


@contextlib.contextmanager
def _trace(
    log_dir: str | os.PathLike[str],
    create_perfetto_link: bool = False,
    create_perfetto_trace: bool = False,
    profiler_options: Any = None,
) -> Iterator[Any]:
    """As `jax.profiler.trace`; the hosts of the cluster are traced, too."""
    profiler = importlib.import_module("jax").profiler
    started = profiler.start_trace(
        log_dir, create_perfetto_link, create_perfetto_trace, profiler_options
    )
    try:
        yield started
    finally:
        profiler.stop_trace()


def _asked_by_pathways() -> bool:
    state = getattr(sys.modules.get(_PATHWAYS), "_profile_state", None)
    return getattr(state, "executable", None) is not None


def _start_hosts(directory: Path, options: Any) -> None:
    global _remote
    request = {
        "traceLocation": str(directory),
        "xprofTraceOptions": {
            "traceDirectory": str(directory),
            "traceSessionName": options.session_id,
            "hostTraceLevel": options.host_tracer_level,
        },
    }
    client = importlib.import_module("jax").local_devices()[0].client
    if client.runtime_type != _RUNTIME:
        return
    programs: Any = importlib.import_module("jax.extend.ifrt_programs").ifrt_programs
    try:
        remote = client.compile_ifrt_program(
            programs.make_plugin_program(json.dumps({"profileRequest": request})),
            programs.make_plugin_compile_options(),
        )
    except Exception as error:  # noqa: BLE001 (this process is traced all the same)
        say(f"the hosts are not traced: {error}")
        return
    if _execute(remote, "the hosts are not traced"):
        with _lock:
            _remote = remote


def _execute(program: Any, otherwise: str) -> bool:
    try:
        results = program.execute_sharded([], with_tokens=True)
        results.consume_token().block_until_ready()
    except Exception as error:  # noqa: BLE001 (this process is traced all the same)
        say(f"{otherwise}: {error}")
        return False
    return True
