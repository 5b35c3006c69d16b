"""One execution of a program on this host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, final

from regrow.channel.commands import Execute
from regrow.worker.gang import Gang
from regrow.worker.platform import Domain
from regrow.worker.programs import Program
from regrow.worker.store import Part, PartError, Store, epoch_over, wait_for

_ENTER_S: Final = 600.0


@final
class Launcher:
    """Runs programs over the parts of a store."""

    def __init__(self, store: Store, spawn: Callable[[Callable[[], None]], Any]) -> None:
        self._store = store
        self._spawn = spawn

    def fail(self, command: Execute, error: PartError) -> None:
        """Gives every output of an execution the same error."""
        self._store.fail(_results(command), error)

    def run_home(self, command: Execute, program: Program) -> None:
        """Runs a program of this host alone: here, or on a helper where it might block."""
        parts = [self._store.get(aid) for aid in command.args]
        if program.callbacks is not None or any(
            part.pending or part.busy is not None or part.being_read() for part in parts
        ):
            self._run_aside(command, program, parts)
            return
        try:
            outs, status = self._start(command, program, parts)
        except Exception as error:  # noqa: BLE001 - the outputs carry it
            self.fail(command, PartError.of(error))
            return
        self._keep(command, outs, status)

    def refuse_gang(self, command: Execute, gang: Gang | None, error: PartError) -> None:
        """Fails this host's share of a program across hosts, and has its peers told."""
        if gang is not None:
            gang.not_launched(command.launch, error)
        self.fail(command, error)

    def fail_unloaded(self, command: Execute, gang: Gang | None, error: PartError) -> None:
        """Fails an execution whose program could not be loaded, or went with its epoch.

        Where the epoch has ended it is told as what ended it, which may be this very launch, or an
        argument: the error that the epoch left there is nobody's own.
        """
        ended = None if gang is None else gang.ended_with(command.launch)
        if gang is None or ended is None:
            self.refuse_gang(command, gang, error)
            return
        parts = [self._store.get(aid) for aid in command.args]
        self._fail_with_arguments(command, parts, gang.domain, ended)

    def run_gang(self, command: Execute, program: Program, gang: Gang | None) -> None:
        """Runs this host's share of a program across hosts, in the order of launches."""
        epoch = program.domain.epoch
        parts = [self._store.get(aid) for aid in command.args]
        try:
            if gang is None or gang.epoch != epoch:
                raise epoch_over(epoch)
            gang.enter(command.launch)
        except PartError as error:
            self._fail_with_arguments(command, parts, program.domain, error)
            return
        if program.callbacks is not None:
            self._run_aside(command, program, parts, gang)
        else:
            self._run_in_gang(command, program, parts, gang)

    def _fail_with_arguments(
        self, command: Execute, parts: list[Part], ended: Domain | None, error: PartError
    ) -> None:
        """Fails an execution with the error of an argument, if one failed in the same epoch.

        That has no domain if it was never formed.
        """
        if ended is None or not any(part.pending and part.domain is ended for part in parts):
            self.fail(command, _lost_with(parts, ended) or error)
            return
        results = [Part.expected(ended, ()) for _ in _results(command)]
        for aid, part in zip(_results(command), results, strict=True):
            self._store.set(aid, part)

        def later() -> None:
            failed = Part.failed(ended, _lost_with(parts, ended) or error)
            for part in results:
                part.resolve(failed)

        self._spawn(later)

    def _run_in_gang(
        self, command: Execute, program: Program, parts: list[Part], gang: Gang
    ) -> None:
        for reading in [reading for part in parts for reading in part.being_read()]:
            reading.wait(_ENTER_S)
        try:
            outs, status = self._start(command, program, parts, gang)
        except Exception as error:  # noqa: BLE001 - told to the head, and by the outputs
            self.refuse_gang(command, gang, PartError.of(error, gang.epoch))
            return
        self._keep(command, outs, status)

    def _start(
        self, command: Execute, program: Program, parts: list[Part], gang: Gang | None = None
    ) -> tuple[list[Part], Part | None]:
        domain, devices, epoch = program.domain, program.devices, program.domain.epoch
        args = []
        for part in parts:
            if part.domain is not domain:
                part.move(domain)
            if part.error is not None:
                raise part.error.fresh()
            if part.whole is None or isinstance(part.whole, list):
                part.whole = domain.assemble(devices, part.singles())
            if part.epoch > epoch:
                epoch = part.epoch
            args.append(part.whole)
        if gang is None:
            arrays, token = program.run(args, command.launch, bool(command.status))
        else:
            arrays, token = gang.make(
                command.launch, lambda: program.run(args, command.launch, with_token=True)
            )
            token = gang.launched(command.launch, token, arrays[0] if arrays else None)
            if command.exe not in gang.ran:
                gang.ran.add(command.exe)
                gang.count_links()
        outs = [Part(domain, program.local, whole=array, epoch=epoch) for array in arrays]
        status = None
        if command.status:
            status = Part(domain, program.local, whole=[token], epoch=epoch)
        return outs, status

    def _keep(self, command: Execute, outs: list[Part], status: Part | None) -> None:
        for aid, part in zip(command.outs, outs, strict=True):
            self._store.set(aid, part)
        if status is not None:
            self._store.set(command.status, status)

    def _run_aside(
        self, command: Execute, program: Program, parts: list[Part], gang: Gang | None = None
    ) -> None:
        """Launches on a helper; the executor goes on once XLA holds the inputs.

        XLA runs cheap programs inline, so a launch returns only after its callbacks have: waiting for
        that here would hang a callback which uses the cluster itself. Arguments stay marked as busy
        until the launch has returned, so that a later program which donates one of them waits.
        """
        results = {aid: Part.expected(program.domain, program.local) for aid in _results(command)}
        for aid, part in results.items():
            self._store.set(aid, part)
        launched = threading.Event()
        before = [part.busy for part in parts if part.busy is not None]
        before += [reading for part in parts for reading in part.being_read()]
        for part in parts:
            part.busy = launched
        entered = threading.Event()
        if program.callbacks is not None:
            program.callbacks.when_entered(entered.set)

        def run() -> None:
            try:
                for event in before:
                    event.wait(_ENTER_S)
                self._resolve(command, results, *self._start_settled(command, program, parts, gang))
            except Exception as error:  # noqa: BLE001 - the outputs carry it
                failed_with = PartError.of(error, program.domain.epoch)
                if gang is not None:
                    gang.not_launched(command.launch, failed_with)
                failed = Part.failed(program.domain, failed_with)
                for part in results.values():
                    part.resolve(failed)
            finally:
                launched.set()
                entered.set()
                for part in parts:
                    if part.busy is launched:
                        part.busy = None

        self._spawn(run)
        if gang is not None:
            entered.wait(_ENTER_S)

    def _start_settled(
        self, command: Execute, program: Program, parts: list[Part], gang: Gang | None
    ) -> tuple[list[Part], Part | None]:
        for part in parts:
            part.settle()
        return self._start(command, program, parts, gang)

    def _resolve(
        self,
        command: Execute,
        results: dict[int, Part],
        outs: list[Part],
        status: Part | None,
    ) -> None:
        for aid, part in zip(command.outs, outs, strict=True):
            results[aid].resolve(part)
        if status is not None:
            results[command.status].resolve(status)


def _lost_with(parts: list[Part], ended: Domain | None) -> PartError | None:
    """The error of the first argument that came out of a domain which has ended, if one has one."""
    for part in parts:
        if part.domain is ended:
            try:
                wait_for([part])
            except PartError as error:
                return error
    return next((part.error for part in parts if part.error is not None), None)


def _results(command: Execute) -> list[int]:
    return [*command.outs, command.status] if command.status else list(command.outs)
