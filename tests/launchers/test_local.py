from __future__ import annotations

import asyncio
import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from regrow.errors import LaunchError
from regrow.launchers import forks, local
from regrow.launchers.base import HostSpec
from regrow.launchers.local import LocalLauncher, worker_environ
from regrow.launchers.logs import MAX_BYTES, HostLog
from regrow.processes import RUN_MARK, ProcessStat, children_of, is_running, marked, spawn
from waiting import until, until_on_loop

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"


def environ(run_id: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{SOURCES}{os.pathsep}{HERE}", RUN_MARK: run_id}


@pytest.fixture
def run_id():
    """The id of a run that must have ended with the test."""
    run_id = secrets.token_hex(8)
    yield run_id
    until(lambda: not marked(run_id), "the end of its processes")


@pytest.fixture
def launching(tmp_path, run_id):
    """Runs a coroutine with a launcher whose template imports nothing but the targets."""

    @asynccontextmanager
    async def launcher(**options) -> AsyncIterator[LocalLauncher]:
        options = {"modules": ("targets",), "entry": "targets:wait"} | options
        made = LocalLauncher(tmp_path / "logs", environ=environ(run_id), **options)
        try:
            yield made
        finally:
            await made.close()

    def run(test: Callable[[LocalLauncher], Awaitable[None]], **options) -> None:
        async def main() -> None:
            async with asyncio.timeout(30), launcher(**options) as made:
                await test(made)

        asyncio.run(main())

    return run


async def exit_of(process) -> str:
    """How a process ends."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    process.on_exit(ended.set_result)
    async with asyncio.timeout(10):
        return await ended


def spec(**options) -> HostSpec:
    return HostSpec(1, 0, 3, (2, 3), "/nowhere/workers.sock", b"\x00secret", options)


async def answer(path: Path):
    await until_on_loop(lambda: path.exists())
    return load(path)


def load(path: Path):
    return json.loads(path.read_text())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_host_is_a_clean_child_of_the_launcher(launching, tmp_path):
    path = tmp_path / "answer"

    async def test(launcher):
        process = await launcher.start(spec(answer=str(path), extra=7))
        told = await answer(path)
        assert told["pid"] == told["session"] == process.pid
        assert told["parent"] == os.getpid()
        assert told["stdin"] == os.devnull
        assert told["threads"] == 1
        assert told["files"] == []
        assert told["name"] == "rg-s1h0"
        assert told["spec"] == {
            "slice": "1",
            "host": "0",
            "incarnation": "3",
            "devices": "[2, 3]",
            "endpoint": "'/nowhere/workers.sock'",
            "secret": repr(b"\x00secret"),
            "answer": repr(str(path)),
            "extra": "7",
        }
        assert await exit_of(process) == "exit status 0"

    launching(test, entry="targets:tell")


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ("targets:leave", "exit status 7"),
        ("targets:fail", "exit status 1"),
        ("targets:not_there", "exit status 1"),
        ("not_there:at_all", "exit status 1"),
    ],
)
def test_the_exit_of_a_host_is_told(launching, entry, cause):
    async def test(launcher):
        assert await exit_of(await launcher.start(spec(status=7))) == cause

    launching(test, entry=entry)


def test_what_a_host_writes_is_in_its_log_by_incarnation(launching, tmp_path):
    async def test(launcher):
        for _ in range(4):
            await exit_of(await launcher.start(spec()))
        names = sorted(path.name for path in (tmp_path / "logs").iterdir())
        assert names == [
            "slice1-host0.log",
            "slice1-host0.log.1",
            "slice1-host0.log.2",
            "template.log",
        ]
        log = (tmp_path / "logs/slice1-host0.log").read_text()
        assert log.endswith("RuntimeError: it failed\n")
        assert (tmp_path / "logs/slice1-host0.log").stat().st_mode & 0o777 == 0o600

    launching(test, entry="targets:fail")


@pytest.mark.parametrize("stopped", [False, True])
def test_the_death_of_a_host_is_seen_at_once(launching, stopped):
    async def test(launcher):
        process = await launcher.start(spec())
        if stopped:
            process.stop()
            await until_on_loop(lambda: ProcessStat.of(process.pid).state == "T")
        began_at = time.monotonic()
        process.kill()
        assert await exit_of(process) == "SIGKILL (signal 9)"
        assert time.monotonic() - began_at < 0.5
        assert process.cause == "SIGKILL (signal 9)"
        process.kill()
        process.cont()
        assert await exit_of(process) == "SIGKILL (signal 9)"

    launching(test)


def test_a_stopped_host_goes_on(launching):
    async def test(launcher):
        process = await launcher.start(spec())
        process.stop()
        await until_on_loop(lambda: ProcessStat.of(process.pid).state == "T")
        process.cont()
        await until_on_loop(lambda: ProcessStat.of(process.pid).state == "S")

    launching(test)


@pytest.mark.parametrize("by", ["kill", "its own end"])
def test_what_a_host_has_started_ends_with_it(launching, tmp_path, by):
    path = tmp_path / "answer"

    async def test(launcher):
        process = await launcher.start(spec(answer=str(path)))
        await until_on_loop(lambda: path.exists() and path.read_text())
        child = int(path.read_text())
        assert is_running(child)
        if by == "kill":
            process.kill()
        else:
            os.kill(process.pid, signal.SIGTERM)
        await exit_of(process)
        await until_on_loop(lambda: ProcessStat.of(child) is None)

    launching(test, entry="targets:breed")


def test_the_death_of_the_template_is_no_event(launching):
    async def test(launcher):
        first = await launcher.start(spec())
        template = launcher.template_pid
        os.kill(template, signal.SIGKILL)
        second = await launcher.start(spec())
        assert launcher.template_pid != template
        assert first.cause is None
        assert second.cause is None

    launching(test)


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_template_that_is_stopped_is_replaced(launching, monkeypatch, waited_for):
    monkeypatch.setattr(forks, "_PING_S", 0.05)

    async def test(launcher):
        first = await launcher.start(spec())
        template = launcher.template_pid
        os.kill(template, signal.SIGSTOP)
        if not waited_for:
            await until_on_loop(lambda: launcher.template_pid != template)
        second = await launcher.start(spec())
        assert launcher.template_pid != template
        assert ProcessStat.of(template) is None
        assert (first.cause, second.cause) == (None, None)

    launching(test)


def test_a_template_that_answers_stays(launching, monkeypatch):
    monkeypatch.setattr(forks, "_PING_S", 0.02)
    monkeypatch.setattr(forks, "_PINGS_UNANSWERED", 50)

    async def test(launcher):
        await launcher.start(spec())
        template = launcher.template_pid
        await asyncio.sleep(1.3)
        assert launcher.template_pid == template

    launching(test)


def test_a_template_that_is_stopped_while_it_imports_is_replaced(launching, monkeypatch, tmp_path):
    monkeypatch.setattr(forks, "_PING_S", 0.01)
    monkeypatch.setenv("HESITANT_MARK", str(tmp_path / "mark"))

    async def test(launcher):
        template = launcher.template_pid
        process = await launcher.start(spec())
        assert launcher.template_pid != template
        assert process.cause is None

    launching(test, modules=("hesitant", "targets"))


def test_a_template_that_cannot_be_started_again_is_tried_again(launching, monkeypatch, caplog):
    refusals = 2

    def refusing(*arguments, **more):
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return spawn(*arguments, **more)

    async def test(launcher):
        await launcher.start(spec())
        template = launcher.template_pid
        monkeypatch.setattr(forks, "spawn", refusing)
        os.kill(template, signal.SIGKILL)
        await until_on_loop(lambda: refusals == 1)
        with pytest.raises(LaunchError, match="no more processes"):
            await launcher.start(spec())
        assert (await launcher.start(spec())).cause is None
        assert launcher.template_pid != template

    launching(test)
    assert caplog.records


def test_what_the_system_refuses_is_a_failed_start(launching, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "too many open files")

    async def test(launcher):
        for owner, name in ((HostLog, "begin"), (local, "LocalProcess")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, refuse)
                with pytest.raises(LaunchError, match="too many open files"):
                    await launcher.start(spec())
        assert (await launcher.start(spec())).cause is None

    launching(test)


def test_a_start_outlives_the_template(launching, run_id, tmp_path):
    """The template dies right after its fork: what it forked is ended, and forked again."""

    async def test(launcher):
        template = launcher.template_pid
        process = await launcher.start(spec(answer=str(tmp_path / "done"), template=template))
        await until_on_loop(lambda: (tmp_path / "done").exists())
        await launcher.start(spec(answer=str(tmp_path / "done"), template=template))
        assert process.cause is None
        assert launcher.template_pid != template
        assert len(children_of(os.getpid()) & {process.pid, launcher.template_pid}) == 2

    launching(test, entry="targets:kill_template")


def test_many_hosts_start_at_once(launching):
    async def test(launcher):
        hosts = await asyncio.gather(*(launcher.start(spec()) for _ in range(12)))
        assert len({host.pid for host in hosts}) == 12

    launching(test)


def test_a_template_that_cannot_import_is_one_clear_error(launching):
    async def test(launcher):
        for _ in range(2):
            with pytest.raises(LaunchError, match=r"No module named 'not_there'"):
                await launcher.start(spec())

    launching(test, modules=("not_there",))


def test_a_closed_launcher_starts_nothing(launching):
    async def test(launcher):
        await launcher.start(spec())
        await launcher.close()
        with pytest.raises(LaunchError, match="closed"):
            await launcher.start(spec())

    launching(test)


def test_nothing_is_left(launching):
    async def test(launcher):
        files = open_files()
        hosts = [await launcher.start(spec()) for _ in range(3)]
        hosts[0].stop()
        await launcher.close()
        assert all(host.cause == "SIGKILL (signal 9)" for host in hosts)
        assert open_files() <= files

    before = children_of(os.getpid())
    launching(test)
    assert children_of(os.getpid()) <= before


OWNER = """
import asyncio, os, sys
from pathlib import Path
from regrow.launchers.base import HostSpec
from regrow.launchers.local import LocalLauncher

async def main():
    launcher = LocalLauncher(Path(sys.argv[1]), modules=("targets",), entry="targets:wait")
    hosts = [await launcher.start(HostSpec(0, i, 1, (i,), "", b"")) for i in range(2)]
    hosts[1].stop()
    print(launcher.template_pid, *(host.pid for host in hosts), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_hosts_end_with_the_head_also_stopped_ones(run_id, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        env=environ(run_id),
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 3
        owner.kill()
    until(lambda: not any(is_running(pid) for pid in pids))


def test_workers_get_none_of_the_users_settings_for_a_client():
    told = worker_environ(
        {
            "PATH": "/bin",
            "JAX_PLATFORMS": "proxy,cpu",
            "JAX_BACKEND_TARGET": "grpc://elsewhere:1",
            "JAX_ENABLE_X64": "1",
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
            "MEGASCALE_NUM_SLICES": "3",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false",
        }
    )
    assert told == {
        "PATH": "/bin",
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": "--xla_cpu_enable_fast_math=false --xla_cpu_collective_timeout_seconds=60",
    }


def test_a_collective_timeout_of_the_users_own_is_kept():
    told = worker_environ({"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=7"}, log_level=0)
    assert told["XLA_FLAGS"] == "--xla_cpu_collective_timeout_seconds=7"
    assert told["TF_CPP_MIN_LOG_LEVEL"] == "0"


def test_sources_are_where_the_tests_think():
    assert (SOURCES / "regrow").is_dir()


def test_no_log_grows_for_ever(launching, tmp_path):
    async def test(launcher: LocalLauncher) -> None:
        spec = HostSpec(0, 0, 1, (0,), "", b"")
        await launcher.start(spec)
        logs = [tmp_path / "logs" / f"{name}.log" for name in ("head", "template", spec.label)]
        for log in logs:
            with log.open("ab") as file:
                file.truncate(MAX_BYTES + 1)
        await until_on_loop(lambda: all(log.stat().st_size <= MAX_BYTES for log in logs))

    launching(test)
