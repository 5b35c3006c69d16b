"""Who is in an epoch, and the inquest when a program of it fails."""

from __future__ import annotations

from typing import Any

import pytest
from head_world import World, run

from regrow.channel import commands as c
from regrow.errors import Code, SliceLostError, StatusError

TRANSPORT = "Gloo all-reduce failed: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"
OWN = StatusError(Code.INVALID_ARGUMENT, "the program's own error about a connection")


class Verdicts:
    """What `judge` calls with its verdict."""

    def __init__(self) -> None:
        self.all: list[StatusError] = []

    def __call__(self, error: StatusError) -> None:
        self.all.append(error)


def judge(world: World, epoch: int, text: str = TRANSPORT, code: Code = Code.UNKNOWN) -> Verdicts:
    verdicts = Verdicts()
    world.runtime.epochs.judge(epoch, StatusError(code, text), verdicts)
    return verdicts


def fail_epochs(world: World, host: int) -> list[c.FailEpoch]:
    return [command for command in world.hosts[host].epochs if isinstance(command, c.FailEpoch)]


# --- forming --------------------------------------------------------------------------------------


def test_an_epoch_of_all_hosts_is_formed_ahead_of_its_first_program() -> None:
    async def main(world: World) -> None:
        await world.settle()
        members = ((0,), (1,), (2,), (3,))
        address = world.runtime.coordination.address
        keys = []
        for host in range(4):
            (form,) = world.sent(host, c.FormEpoch)
            assert form[:4] == (1, host, members, address)
            keys.append(form.key)
        assert len(set(keys)) == 4
        assert world.runtime.epochs.covering((1, 3)) == 1
        world.runtime.epochs.form_if_needed()
        await world.settle()
        assert len(world.sent(0, c.FormEpoch)) == 1

    run(main, slices=2, hosts=2, devices=2)


def test_one_host_needs_no_epoch() -> None:
    async def main(world: World) -> None:
        await world.settle()
        assert not world.sent(0, c.FormEpoch)

    run(main, slices=1)


def test_a_loss_leads_to_an_epoch_of_the_survivors_and_a_return_to_one_of_all() -> None:
    async def main(world: World) -> None:
        await world.settle()
        lost = world.lose(1)
        await world.settle()
        for host, node in ((0, 0), (2, 1)):
            assert fail_epochs(world, host) == [c.FailEpoch(1, lost.message, (1000, 1001, 1002))]
            assert world.hosts[host].epochs[-1][:3] == (2, node, ((0, 1), (4, 5)))
            assert isinstance(world.hosts[host].epochs[2], c.Adopt)
        epochs = world.runtime.epochs
        assert epochs.covering((0, 2)) == 2
        world.up(1)
        await world.settle()
        # The epoch of the survivors serves them until a program needs more.
        assert epochs.covering((0, 2)) == 2
        assert epochs.covering((0, 1)) == 3
        await world.settle()
        (form,) = world.sent(1, c.FormEpoch)
        assert form[:3] == (3, 1, ((0, 1), (2, 3), (4, 5)))
        assert c.FailEpoch(2, "", ()) not in fail_epochs(world, 0)

    run(main, slices=3)


def test_an_incarnation_that_is_no_member_ends_no_epoch() -> None:
    async def main(world: World) -> None:
        await world.settle()
        epochs = world.runtime.epochs
        epochs.host_lost(1, 7, SliceLostError(1, 7, "of another time"))
        await world.settle()
        assert not fail_epochs(world, 0)
        assert epochs.covering((0, 1)) == 1

    run(main)


# --- the inquest ----------------------------------------------------------------------------------


def test_all_hosts_answer_so_a_programs_own_error_is_told_as_it_is() -> None:
    async def main(world: World) -> None:
        await world.settle()
        verdicts = Verdicts()
        world.runtime.epochs.judge(1, OWN, verdicts)
        assert not verdicts.all
        await world.settle()
        assert verdicts.all == [OWN]
        # What else was in flight ends, since ranks may have run apart; and it says so.
        innocent = judge(world, 1, "epoch 1 has ended", Code.DATA_LOSS)
        (failed,) = fail_epochs(world, 0)
        assert [error.message for error in innocent.all] == [failed.message]
        assert failed.message.startswith("slice 0 gave up its collective links to slice 1 in epoch")
        assert OWN.message in failed.message
        # A callback that met a lost slice told so itself.
        nested = judge(world, 1, "slice 1 was lost", Code.DATA_LOSS)
        assert [error.message for error in nested.all] == ["slice 1 was lost"]

    run(main)


def reported(world: World, *report: Any) -> list[c.FailEpoch]:
    """What the first host is told after a report of the second."""
    world.runtime.report(world.hosts[1].link, c.EpochBroken(*report))
    return fail_epochs(world, 0)


def test_a_programs_own_error_ends_it_everywhere_and_nothing_else() -> None:
    async def main(world: World) -> None:
        await world.settle()
        # It says what a link would say, but the host knows whose it is.
        reported(world, 1, 7, f"my text: {TRANSPORT}", Code.INVALID_ARGUMENT)
        await world.settle()
        (failed,) = fail_epochs(world, 0)
        own = (failed.launch, failed.code, failed.own)
        assert own == (7, Code.INVALID_ARGUMENT, f"my text: {TRANSPORT}")
        assert failed.message.startswith("slice 0 gave up its collective links")
        # The links that are cut thereupon fail under the same program.
        cut = judge(world, 1)
        assert [(e.code, e.message) for e in cut.all] == [(Code.INVALID_ARGUMENT, failed.own)]

    run(main)


def test_which_program_failed_may_be_told_later() -> None:
    async def main(world: World) -> None:
        await world.settle()
        judge(world, 1, OWN.message)
        reported(world, 1, 7, OWN.message, OWN.code)
        await world.settle()
        (failed,) = fail_epochs(world, 0)
        assert (failed.launch, failed.code, failed.own) == (7, OWN.code, OWN.message)

    run(main)


def test_links_that_broke_have_no_program_of_their_own() -> None:
    async def main(world: World) -> None:
        await world.settle()
        reported(world, 1, 7, TRANSPORT)
        await world.settle()
        (failed,) = fail_epochs(world, 0)
        assert (failed.launch, failed.code, failed.own) == (0, 0, "")
        assert failed.message.startswith("slice 0 lost its collective links")

    run(main)


def test_an_argument_that_was_lost_before_tells_of_that_loss() -> None:
    async def main(world: World) -> None:
        await world.settle()
        epochs = world.runtime.epochs
        lost = world.lose(2)
        assert epochs.covering((0, 1)) == 2
        await world.settle()
        reported(world, 2, 7, TRANSPORT, Code.UNKNOWN, 1)
        await world.settle()
        failed = fail_epochs(world, 0)[-1]
        assert (failed.epoch, failed.launch, failed.code) == (2, 7, Code.DATA_LOSS)
        assert failed.own == lost.message

    run(main, slices=3)


@pytest.mark.parametrize(
    "text",
    [
        TRANSPORT,
        "Gloo ReduceScatter timed out: x",
        "Error dispatching computation: Gloo AllGather failed: x",
        "Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out",
    ],
)
def test_all_hosts_answer_so_a_transports_error_is_a_broken_link(text: str) -> None:
    async def main(world: World) -> None:
        await world.settle()
        verdicts = judge(world, 1, text)
        await world.settle()
        (error,) = verdicts.all
        assert error.code is Code.DATA_LOSS
        assert error.message.startswith("slice 0 lost its collective links to slices 1, 2")
        assert "all of them live" in error.message
        assert text in error.message

    run(main, slices=3)


def test_links_within_one_slice() -> None:
    async def main(world: World) -> None:
        await world.settle()
        verdicts = judge(world, 1)
        await world.settle()
        assert verdicts.all[0].message.startswith(
            "slice 0 lost its collective links between its hosts in epoch 1"
        )

    run(main, slices=1, hosts=2)


def test_a_loss_meanwhile_is_the_verdict() -> None:
    async def main(world: World) -> None:
        await world.settle()
        world.hosts[1].answers_pings = False
        verdicts = judge(world, 1)
        more = judge(world, 1, "another host's view of it")
        await world.settle()
        assert not verdicts.all
        lost = world.lose(1)
        assert verdicts.all == more.all == [lost]
        assert judge(world, 1).all == [lost]
        await world.settle()
        assert fail_epochs(world, 0)[0].message == lost.message

    run(main, slices=3)


def test_the_verdict_stands_for_whoever_asks_later() -> None:
    async def main(world: World) -> None:
        await world.settle()
        first = judge(world, 1)
        world.runtime.epochs.broken(c.EpochBroken(1, 5, "the same, from another host"))
        await world.settle()
        late = judge(world, 1, "some other text of it")
        assert late.all == first.all
        # A program's own error has no verdict of its own, so each keeps its text.
        world.runtime.epochs.covering((0, 1))
        await world.settle()
        judge(world, 2, "its own fault")
        await world.settle()
        assert [e.message for e in judge(world, 2, "also its own").all] == ["also its own"]

    run(main)


def test_hosts_are_asked_once_for_an_inquest_and_none_of_another_time() -> None:
    async def main(world: World) -> None:
        await world.settle()
        for _ in range(3):
            judge(world, 1)
        await world.settle()
        for host in range(2):
            (ping,) = world.sent(host, c.Ping)
            assert ping.number < 0

    run(main)


def test_heartbeats_are_no_answers() -> None:
    async def main(world: World) -> None:
        await world.settle()
        world.hosts[0].answers_pings = world.hosts[1].answers_pings = False
        verdicts = judge(world, 1)
        await world.settle()
        for host in range(2):
            world.runtime.report(world.hosts[host].link, c.Pong(5, 0))
        assert not verdicts.all
        for host in range(2):
            world.runtime.report(world.hosts[host].link, c.Pong(-1, 0))
        assert len(verdicts.all) == 1

    run(main)


def test_an_old_answer_counts_for_no_new_inquest() -> None:
    async def main(world: World) -> None:
        await world.settle()
        world.up(2)
        epochs = world.runtime.epochs
        assert epochs.covering((0, 2)) == 2
        for host in world.hosts.values():
            host.answers_pings = False
        judge(world, 1)
        later = judge(world, 2)
        for host in range(3):
            world.runtime.report(world.hosts[host].link, c.Pong(-1, 0))
        assert not later.all
        for host in range(3):
            world.runtime.report(world.hosts[host].link, c.Pong(-2, 0))
        assert later.all

    async def two_of_three(world: World) -> None:
        world.up(0)
        world.up(1)
        world.runtime.epochs.form_if_needed()
        await main(world)

    run(two_of_three, slices=3, up=False)


def test_an_epoch_that_was_left_for_a_larger_one_still_has_a_verdict() -> None:
    async def main(world: World) -> None:
        await world.settle()
        epochs = world.runtime.epochs
        world.lose(1)
        assert epochs.covering((0, 2)) == 2
        world.up(1)
        assert epochs.covering((0, 1, 2)) == 3
        await world.settle()
        # A program of epoch 2 is still in flight when slice 2 is lost.
        lost = world.lose(2)
        assert judge(world, 2).all == [lost]
        assert judge(world, 3).all == [lost]
        assert judge(world, 1).all[0].message.startswith("slice 1")

    run(main, slices=3)


def test_an_inquest_ends_with_its_epoch_however_old_it_is() -> None:
    async def main(world: World) -> None:
        await world.settle()
        epochs = world.runtime.epochs
        world.hosts[0].answers_pings = False
        verdicts = judge(world, 1)
        # Many larger epochs are formed before the verdict.
        for _ in range(20):
            world.up(1)
            epochs._current = None
            epochs.form_if_needed()
        await world.settle()
        lost = world.lose(0)
        assert verdicts.all == [lost]

    run(main)


def test_an_epoch_that_nobody_remembers() -> None:
    async def main(world: World) -> None:
        verdicts = Verdicts()
        world.runtime.epochs.judge(99, OWN, verdicts)
        assert verdicts.all == [OWN]
        assert judge(world, 99).all[0].code is Code.DATA_LOSS
        world.runtime.epochs.broken(c.EpochBroken(99, 0, TRANSPORT))
        world.runtime.epochs.formed(99, 0, 1)

    run(main)
