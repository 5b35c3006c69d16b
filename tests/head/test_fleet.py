"""Slices over all their lives: fake processes, real channels."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from head_world import Answer

from regrow.channel import commands as c
from regrow.channel.handshake import Identity, Role, new_secret
from regrow.channel.worker_end import WorkerChannel
from regrow.config import HeadConfig
from regrow.errors import (
    ControlError,
    HandshakeError,
    LaunchError,
    SliceLostError,
    UsageError,
    WaitTimeout,
)
from regrow.head import inflict
from regrow.head.fleet import Fleet
from regrow.head.guard import Guard
from regrow.head.links import Link
from regrow.head.topology import Topology
from regrow.launchers.base import HostSpec
from waiting import until_on_loop

WAIT_S = 10.0


class FakeProcess:
    """A host: its signals are noted, and it ends when it is told to."""

    def __init__(self, bench: Bench, spec: HostSpec) -> None:
        self.pid = 4000 + len(bench.processes)
        self.spec = spec
        self.cause: str | None = None
        self.signals: list[str] = []
        self.ends_when_killed = True
        self.answers_pings = threading.Event()
        self.answers_pings.set()
        self.channel: WorkerChannel | None = None
        self.lost: list[str] = []
        self._callbacks: list[Callable[[str], None]] = []

    def kill(self) -> None:
        self.signals.append("kill")
        if self.ends_when_killed:
            asyncio.get_running_loop().call_soon(self.end, "SIGKILL (signal 9)")

    def send(self, signum: signal.Signals) -> None:
        self.signals.append(signum.name)

    def stop(self) -> None:
        self.signals.append("stop")
        self.answers_pings.clear()

    def cont(self) -> None:
        self.signals.append("cont")
        self.answers_pings.set()

    def on_exit(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)

    def end(self, cause: str) -> None:
        if self.cause is None:
            self.cause = cause
            self.answers_pings.clear()
            for callback in self._callbacks:
                callback(cause)

    # --- what the process does ---

    def connect(self, **other: Any) -> WorkerChannel:
        spec = self.spec
        role: Role = other.get("role", "worker")
        incarnation = other.get("incarnation", spec.incarnation)
        channel = WorkerChannel(
            spec.endpoint,
            other.get("secret", spec.secret),
            Identity(role, spec.slice_index, spec.host_index, incarnation, os.getpid()),
            lambda data: self._payload(channel, data),
            self.lost.append,
            budget_s=0.2,
        )
        channel.connect(other.get("timeout_s", 5.0))
        return channel

    def come_up(self) -> None:
        self.channel = self.connect()
        self.channel.send(c.pack_all([c.Up("0.10.2", True)]))

    def _payload(self, channel: WorkerChannel, data: bytes | memoryview) -> None:
        for command in c.unpack(data):
            if isinstance(command, c.Ping) and self.answers_pings.is_set():
                channel.send(c.pack_all([c.Pong(command.number, 0)]))


class Bench:
    """A fleet, what it starts, and what it tells."""

    def __init__(self, folder: Path, slices: int, hosts: int, **config: Any) -> None:
        self.launches_fail: int = config.pop("launches_fail", 0)
        self.launches_wait_for: str = config.pop("launches_wait_for", "")
        config = {"hang_after_s": 5.0, "reconnect_s": 1.0} | config
        self.config = HeadConfig(
            "test", "run", "/home", str(folder), str(folder), slices, 2, hosts, **config
        )
        self.secret = new_secret()
        self.channel_port: int | None = None
        self.processes: list[FakeProcess] = []
        self.launch_gate = asyncio.Event()
        self.launch_gate.set()
        self.closed = False
        self.ups: list[tuple[int, int, list[Link]]] = []
        self.losses: list[tuple[SliceLostError, str, bool]] = []
        self.reports: list[tuple[Link, Any]] = []
        self.ended: list[str] = []
        topology = Topology(slices, hosts, 2)
        self.fleet = Fleet(self.config, topology, self, self.secret, self)  # type: ignore[arg-type]

    # --- a launcher ---

    async def start(self, spec: HostSpec) -> FakeProcess:
        if self.launches_wait_for:
            spec.note(self.launches_wait_for)
        await self.launch_gate.wait()
        if self.launches_fail:
            self.launches_fail -= 1
            raise LaunchError("no more processes")
        self.processes.append(FakeProcess(self, spec))
        return self.processes[-1]

    async def close(self) -> None:
        self.closed = True

    # --- an owner ---

    def report(self, link: Link, command: Any) -> None:
        self.reports.append((link, command))

    def slice_up(self, slice_index: int, incarnation: int, links: list[Link]) -> None:
        self.ups.append((slice_index, incarnation, links))

    def slice_lost(
        self, error: SliceLostError, cause: str, was_up: bool, since: float | None = None
    ) -> None:
        self.losses.append((error, cause, was_up))

    def job_ends(self, text: str) -> None:
        self.ended.append(text)

    # --- the test's ---

    def of(self, index: int, incarnation: int = 1) -> list[FakeProcess]:
        found = [
            process
            for process in self.processes
            if process.spec.slice_index == index and process.spec.incarnation == incarnation
        ]
        return sorted(found, key=lambda process: process.spec.host_index)

    async def started(self, index: int, incarnation: int = 1) -> list[FakeProcess]:
        hosts = self.config.hosts_per_slice
        await until_on_loop(lambda: len(self.of(index, incarnation)) == hosts, "the processes")
        return self.of(index, incarnation)

    async def come_up(self, index: int, incarnation: int = 1) -> list[FakeProcess]:
        processes = await self.started(index, incarnation)
        for process in processes:
            await asyncio.to_thread(process.come_up)
        await until_on_loop(
            lambda: (index, incarnation) in [up[:2] for up in self.ups], "the slice"
        )
        return processes

    def state(self, index: int) -> str:
        return self.fleet.membership.info(index).state


def run(
    folder: Path,
    test: Callable[[Bench], Awaitable[None]],
    slices: int = 2,
    hosts: int = 1,
    **config: Any,
) -> None:
    async def main() -> None:
        bench = Bench(folder, slices, hosts, **config)
        await bench.fleet.open()
        try:
            async with asyncio.timeout(2 * WAIT_S):
                await test(bench)
        finally:
            await bench.fleet.close()
            assert bench.closed
            for process in bench.processes:
                if process.channel is not None:
                    await asyncio.to_thread(process.channel.close)

    asyncio.run(main())


def test_all_slices_are_started_and_come_up(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        for index in (1, 0):
            for host, process in enumerate(await bench.started(index)):
                spec = process.spec
                assert (spec.slice_index, spec.host_index, spec.incarnation) == (index, host, 1)
                assert spec.devices == (2 * index + host,)
                assert spec.secret == bench.secret
            await bench.come_up(index)
        assert [up[:2] for up in bench.ups] == [(1, 1), (0, 1)]
        assert [[link.host for link in links] for _, _, links in bench.ups] == [[2, 3], [0, 1]]
        await bench.fleet.wait_healthy(1.0)
        assert not bench.losses

    run(tmp_path, main, hosts=2)


def test_a_wait_that_ends_says_who_is_missing(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.come_up(0)
        with pytest.raises(WaitTimeout, match="slice 1") as caught:
            await bench.fleet.wait_healthy(0.05)
        assert "slice 0" not in str(caught.value)

    run(tmp_path, main)


def test_a_wait_that_ends_says_what_the_start_waits_for(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.started(0)
        with pytest.raises(WaitTimeout, match=r"slice 0 .*waits for a place"):
            await bench.fleet.wait_healthy(0.05)

    run(tmp_path, main, slices=1, launches_wait_for="waits for a place")


def test_commands_and_reports(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        _, _, (link,) = bench.ups[0]
        answer = Answer()
        link.ask(lambda rid: c.Ready(rid, (1,)), answer)
        assert process.channel is not None
        process.channel.send(c.pack_all([c.Released((5,)), c.EpochFormed(1, 99)]))
        await until_on_loop(lambda: len(bench.reports) >= 2, "the reports")
        reports = [(one.host, command) for one, command in bench.reports]
        assert (0, c.Released((5,))) in reports
        assert (0, c.EpochFormed(1, 99)) in reports

    run(tmp_path, main, slices=1)


def test_a_report_that_cannot_be_handled_ends_the_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        _, _, (link,) = bench.ups[0]
        report = bench.report

        def refuse(link: Link, command: Any) -> None:
            if command == c.Released((5,)):
                raise LookupError("a fault of the head")
            report(link, command)

        guard = Guard(lambda _: None)
        asyncio.get_running_loop().set_exception_handler(guard)
        bench.report = refuse  # type: ignore[method-assign]
        assert process.channel is not None
        process.channel.send(c.pack_all([c.Released((5,)), c.Released((6,))]))
        await until_on_loop(lambda: (link, c.Released((6,))) in bench.reports, "the second report")
        assert "a fault of the head" in caplog.text
        assert "LookupError: a fault of the head" in (guard.failure or "")

    run(tmp_path, main, slices=1)


def test_reports_of_a_slice_that_is_not_up_are_not_told(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.started(0)
        process.channel = await asyncio.to_thread(process.connect)
        process.channel.send(c.pack_all([c.Released((5,))]))
        await asyncio.sleep(0.05)
        assert not bench.reports
        process.channel.send(c.pack_all([c.Up("0.10.2", True), c.Released((6,))]))
        await until_on_loop(lambda: bench.reports, "the report")
        assert [command for _, command in bench.reports] == [c.Released((6,))]

    run(tmp_path, main, slices=1)


def test_a_message_that_is_none_costs_only_itself(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        assert process.channel is not None
        for noise in (b"\xc1", b"\x93\x01", b"\x91\xcd\xff\xff", b"\x05"):
            process.channel.send(noise)
        process.channel.send(c.pack_all([c.Released((6,))]))
        await until_on_loop(lambda: bench.reports, "the report")
        assert not bench.losses

    run(tmp_path, main, slices=1)


@pytest.mark.usefixtures("without_collector")
def test_nothing_is_kept_of_a_host_that_has_ended(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(1)
        gone = weakref.ref(bench.ups.pop()[2][0])
        process.end("SIGKILL (signal 9)")
        await until_on_loop(lambda: gone() is None, "the link to go")

    run(tmp_path, main)


def test_the_end_of_a_process_is_the_loss_of_its_slice(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        processes = await bench.come_up(1)
        await bench.come_up(0)
        links = bench.ups[0][2]
        answers = [Answer(), Answer()]
        for link, answer in zip(links, answers, strict=True):
            link.ask(lambda rid: c.Ready(rid, (1,)), answer)
        processes[0].end("SIGSEGV (signal 11)")
        ((error, cause, was_up),) = bench.losses
        assert (error.slice_index, error.incarnation, was_up) == (1, 1, True)
        assert error.message.startswith("slice 1 ")
        assert "SIGSEGV" in error.message
        assert "SIGSEGV" in cause
        assert [answer.error for answer in answers] == [error, error]
        # Its other host is ended, too.
        assert processes[1].signals == ["kill"]
        await until_on_loop(lambda: processes[1].cause, "the other host")
        assert bench.state(1) == "lost"
        assert bench.state(0) == "up"

    run(tmp_path, main, hosts=2)


def test_a_lost_slice_is_restored_and_its_old_processes_are_kept_out(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        with pytest.raises(ControlError):
            bench.fleet.restore(0)
        process.end("exit status 1")
        assert bench.state(0) == "lost"
        bench.fleet.restore(0)
        (again,) = await bench.come_up(0, 2)
        assert again.spec.incarnation == 2
        assert bench.ups[-1][:2] == (0, 2)
        with pytest.raises(HandshakeError, match="refuses"):
            await asyncio.to_thread(process.connect)
        assert bench.state(0) == "up"

    run(tmp_path, main, slices=1)


def test_a_lost_slice_returns_by_itself_when_that_is_wanted(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        process.end("exit status 1")
        await bench.come_up(0, 2)
        await bench.fleet.wait_healthy(1.0)

    run(tmp_path, main, slices=1, restore_after_s=0.05)


def test_kill(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        processes = await bench.come_up(0)
        await bench.fleet.kill(0)
        assert bench.state(0) == "lost"
        assert [process.signals[0] for process in processes] == ["kill", "kill"]
        assert len(bench.losses) == 1
        with pytest.raises(ControlError, match="slice 0"):
            await bench.fleet.kill(0)
        for wrong in (-1, 2):
            with pytest.raises(UsageError, match=f"no slice {wrong}; the cluster has 2"):
                await bench.fleet.kill(wrong)

    run(tmp_path, main, hosts=2)


def test_a_slice_that_hangs_is_lost_and_fenced(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        await bench.come_up(1)
        started = time.monotonic()
        bench.fleet.stop(0)
        assert process.signals == ["stop"]
        await until_on_loop(lambda: bench.losses, "the loss")
        assert 0.3 < time.monotonic() - started < 5
        error, _, _ = bench.losses[0]
        assert error.slice_index == 0
        assert "kill" in process.signals
        with pytest.raises(ControlError):
            bench.fleet.cont(0)
        assert bench.state(1) == "up"

    run(tmp_path, main, hang_after_s=0.6)


def test_a_short_stop_is_no_loss(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        bench.fleet.stop(0)
        await asyncio.sleep(0.3)
        bench.fleet.cont(0)
        await asyncio.sleep(0.3)
        assert process.signals == ["stop", "cont"]
        assert not bench.losses

    run(tmp_path, main, slices=1, hang_after_s=2.0)


def test_faults_are_done_to_every_host_of_a_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflict, "TERM_GRACE_S", 0.05)

    async def main(bench: Bench) -> None:
        processes, others = await bench.come_up(1), await bench.come_up(0)
        bench.fleet.inflict(1, "segv")
        assert [process.signals for process in processes] == [["SIGSEGV"], ["SIGSEGV"]]
        bench.fleet.inflict(1, "sever")
        members = [member for _, member in bench.fleet._of(1, 1)]
        await until_on_loop(lambda: all(one.connections == 2 for one in members), "new connections")
        assert not bench.losses
        # What a preemption does not end by itself is ended after a grace.
        bench.fleet.inflict(1, "term")
        assert processes[0].signals == ["SIGSEGV", "SIGTERM"]
        await until_on_loop(lambda: bench.losses, "the loss")
        assert "kill" in processes[0].signals
        assert not any(process.signals for process in others)
        with pytest.raises(ControlError, match="slice 1"):
            bench.fleet.inflict(1, "term")
        with pytest.raises(UsageError, match="there is no fault 'flood'; there are diskfull, "):
            bench.fleet.inflict(0, "flood")

    run(tmp_path, main, hosts=2)


def test_a_head_that_stood_still_blames_no_slice(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.come_up(0)
        time.sleep(1.6)  # noqa: ASYNC251 (this is what is tested)
        await asyncio.sleep(0.3)
        assert not bench.losses

    run(tmp_path, main, slices=1, hang_after_s=1.0)


def test_a_break_of_the_connection(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        assert process.channel is not None
        assert process.channel._stream is not None
        process.channel._stream.close()
        member = bench.fleet._members[0, 0, 1]
        await until_on_loop(lambda: member.connections == 2, "the connection")
        assert bench.state(0) == "up"
        assert not bench.losses
        await asyncio.to_thread(process.channel.close)
        await until_on_loop(lambda: bench.losses, "the loss")
        assert "kill" in process.signals

    run(tmp_path, main, slices=1, reconnect_s=0.4)


def test_a_process_that_cannot_be_started(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await until_on_loop(lambda: bench.losses, "the failure")
        ((error, _, was_up),) = bench.losses
        assert not was_up
        assert "no more processes" in error.message
        assert not bench.processes
        assert not bench.fleet._members
        bench.fleet.restore(0)
        await bench.come_up(0, 2)

    run(tmp_path, main, slices=1, launches_fail=1)


def test_a_process_that_comes_to_life_after_its_slice_was_lost_is_ended(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        bench.launch_gate.clear()
        await until_on_loop(lambda: bench.losses, "the start's deadline")
        assert not bench.processes
        bench.launch_gate.set()
        await until_on_loop(lambda: bench.processes, "the process")
        await until_on_loop(lambda: bench.processes[0].cause, "its end")
        assert bench.processes[0].signals == ["kill"]

    run(tmp_path, main, slices=1, start_deadline_s=0.2)


def test_a_job_that_is_not_elastic_ends(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.come_up(0)
        (process,) = await bench.come_up(1)
        process.end("SIGKILL (signal 9)")
        (text,) = bench.ended
        assert "slice 1 was lost" in text
        assert "num_elastic_instances allows 0" in text

    run(tmp_path, main, num_elastic_instances=0, restore_after_s=0.0)


def test_who_is_let_in(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.started(0)
        refusals: list[tuple[dict[str, Any], str]] = [
            ({"secret": new_secret()}, "the secret is not that of this cluster"),
            ({"incarnation": 2}, "refuses"),
            ({"role": "compiler"}, "no compiler is expected"),
        ]
        for other, text in refusals:
            with pytest.raises(HandshakeError, match=text):
                await asyncio.to_thread(lambda other=other: process.connect(**other))
        await bench.come_up(0)
        with pytest.raises(HandshakeError, match="another process is slice 0 host 0"):
            await asyncio.to_thread(process.connect)
        assert bench.state(0) == "up"

    run(tmp_path, main, slices=1)


def test_close_ends_all_without_a_loss(tmp_path: Path) -> None:
    async def main(bench: Bench) -> None:
        (process,) = await bench.come_up(0)
        await bench.fleet.close()
        assert "kill" in process.signals
        assert not bench.losses
        await until_on_loop(lambda: process.lost, "the worker to notice")

    run(tmp_path, main, slices=1)
