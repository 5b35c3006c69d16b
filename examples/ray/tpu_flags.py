"""What the programs here share: the flags that say which TPU, its controller, and how errors are told."""

from __future__ import annotations

import argparse
import getpass
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from regrow.cloud.bodies import NodeRequest
from regrow.cloud.defaults import Defaults
from regrow.cloud.local import connect
from regrow.cloud.names import Place
from regrow.errors import ClusterError, RegrowError, UsageError, WaitTimeout
from regrow.ray import JoinPolicy, RayCluster, RayTpuController, TpuSpec
from regrow.ray.cluster import ADDRESS_VARIABLE
from regrow.ray.head import head_address

EXAMPLES = Path(__file__).resolve().parents[1]
RUNTIME_VERSION = "tpu-ubuntu2204-base"
ZONE = "us-central2-b"


def parser_of(description: str | None, tpu: str) -> argparse.ArgumentParser:
    """A parser with the flags for a TPU that is by default called USER-`tpu`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    name = f"{getpass.getuser()}-{tpu}"
    group = parser.add_argument_group("the TPU, which is made if there is none")
    group.add_argument("--tpu", default=name, metavar="NAME", help=f"default: {name}")
    group.add_argument("--accelerator-type", metavar="TYPE", help="v4-16, say")
    group.add_argument("--type", metavar="GENERATION", help="with --topology; default: V4")
    group.add_argument("--topology", metavar="AxBxC", help="with --type; default: 2x2x2")
    group.add_argument("--spot", action="store_true", help="it may be preempted")
    group.add_argument("--reserved", action="store_true", help="it is of a reservation")
    group.add_argument("--project", help="default: that of regrow config")
    group.add_argument("--zone", help=f"default: that of regrow config, or {ZONE}")
    group.add_argument("--endpoint", help="of the Cloud TPU API; default: the local one")
    group.add_argument("--join-timeout", type=float, default=150, metavar="SECONDS")
    group.add_argument("--delete", action="store_true", help="delete it at the end")
    parser.add_argument("--address", help=f"of the Ray head; default: {ADDRESS_VARIABLE}, or ours")
    return parser


def spec_of(given: argparse.Namespace) -> TpuSpec:
    """What the TPU is to be like.

    Raises:
        UsageError: If there is no such accelerator.
    """
    kind, topology = given.type, given.topology
    if given.accelerator_type is None and kind is None and topology is None:
        kind, topology = "V4", "2x2x2"
    node = NodeRequest(
        runtime_version=RUNTIME_VERSION,
        accelerator_type=given.accelerator_type,
        type=kind,
        topology=topology,
        spot=given.spot,
        reserved=given.reserved,
    )
    spec = TpuSpec(name=given.tpu, node=node)
    _ = spec.accelerator
    return spec


def controller_of(given: argparse.Namespace) -> RayTpuController:
    """The controller of the TPU that the flags tell of."""
    spec = spec_of(given)
    defaults = Defaults()
    place = Place(
        defaults.require("project", given.project),
        given.zone or defaults.all().get("zone", ZONE),
    )
    cluster = RayCluster(head_address(given.address))
    return RayTpuController(
        connect(given.endpoint),
        place,
        spec,
        cluster,
        startup_script='echo "hello world"',
        policy=JoinPolicy(join_s=given.join_timeout),
        say=say,
    )


def say(text: str) -> None:
    """Tells what is done."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def show(rank: int, line: str) -> None:
    """Shows a line that a rank has printed."""
    print(f"[rank {rank}] {line}", flush=True)


def exit_with(main: Callable[[], None]) -> None:
    """Runs a program; an error is one line, and its exit status that of `regrow ray job`."""
    # Ends the ranks, too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except UsageError as error:
        sys.exit(_told(error, 2))
    except (ClusterError, WaitTimeout) as error:
        sys.exit(_told(error, 3))
    except RegrowError as error:
        sys.exit(_told(error, 1))
    except KeyboardInterrupt:
        sys.exit(130)


def _told(error: RegrowError, status: int) -> int:
    print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
    return status
