"""With what heads and nodes are started: how soon a node is found dead, and what a node may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from regrow.errors import UsageError

HANG_AFTER_S: Final = 5.0
"""A node that is silent for so long is dead, by default, in seconds."""

# A node that has died refuses the question at once: three refusals take a second. One that is slow
# or hangs answers none: the timeout of each of three questions makes up the rest.
_QUESTIONS: Final = 3
_PERIOD_S: Final = 0.3
_FIRST_S: Final = 1.0
_SHORTEST_S: Final = 1.5
_LONGEST_S: Final = 86_400.0
_MOST: Final = 10**14
_BUILT_IN: Final = ("CPU", "GPU", "memory", "object_store_memory")

START_ENVIRON: Final = {
    # A raylet ends itself if its agents, whose imports take long on a busy machine, are not up by then.
    "RAY_agent_register_timeout_ms": "150000",
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A runtime environment that cannot be made cannot the next time, for which Ray copies all of a
    # virtual environment again; pip itself tries again where a network fails.
    "RUNTIME_ENV_RETRY_TIMES": "1",
}
"""The variables with which raylets are started on this machine."""


def health_environ(hang_after_s: float = HANG_AFTER_S) -> dict[str, str]:
    """The variables with which a head is started.

    Args:
        hang_after_s: A node that is silent for so long is dead; one whose raylet has been killed
            is dead after a second in any case.

    Raises:
        UsageError: If that is too short for a node that is only busy.
    """
    if not _SHORTEST_S <= hang_after_s <= _LONGEST_S:
        told = f"it must be {_SHORTEST_S:g} s or more, and a day at most"
        raise UsageError(f"hang_after is {hang_after_s:g} s; {told}")
    timeout_s = hang_after_s / _QUESTIONS - _PERIOD_S
    return {
        "RAY_health_check_initial_delay_ms": _ms(_FIRST_S),
        "RAY_health_check_period_ms": _ms(_PERIOD_S),
        "RAY_health_check_timeout_ms": _ms(timeout_s),
        "RAY_health_check_failure_threshold": str(_QUESTIONS),
    }


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))


def check_node_resources(resources: Mapping[str, object]) -> None:
    """Returns if a node can have these resources; Ray would say so late, and with a traceback.

    Raises:
        UsageError: If it cannot.
    """
    for name, number in resources.items():
        if name in _BUILT_IN:
            raise UsageError(
                f"{name} is what Ray itself counts, and no resource of one's own: CPUs are given by "
                "--node-cpus, anything else by another name"
            )
        if not name or "," in name:
            raise UsageError(f"{name!r} cannot name a resource of Ray: it is empty or has a comma")
        if not _is_count(number):
            told = json.dumps({name: number})
            raise UsageError(f"{told} is no resource of a node: give a whole number, 0 or more")


def _is_count(number: object) -> bool:
    # Ray takes true for a number, and its raylet dies of it.
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return 0 <= number <= _MOST and number == int(number)
