"""The state of a head as metrics of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

Families: TypeAlias = Iterator[Any]


def families(status: Mapping[str, Any], known: Iterable[str]) -> Families:
    """The metrics of what a head tells of itself (`regrow status --json`).

    Args:
        status: It.
        known: All states that a slice can be in.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    timeline = status["timeline"]
    spent = CounterMetricFamily("regrow_seconds", "Wall time by bucket.", labels=["bucket"])
    for bucket, seconds in timeline["buckets"].items():
        spent.add_metric([bucket], seconds)
    yield spent
    states = GaugeMetricFamily("regrow_slices", "Slices by state.", labels=["state"])
    # All of them, so that none keeps its last value where it has become none.
    counts = Counter(dict.fromkeys(known, 0))
    counts.update(one["state"] for one in status["slices"])
    for state, count in sorted(counts.items()):
        states.add_metric([state], count)
    yield states
    for name, value, text in (
        (
            "regrow_goodput_ratio",
            timeline["goodput"],
            "Share of the wall time that was productive.",
        ),
        ("regrow_clients", status["clients"], "Clients that are connected."),
        ("regrow_step", timeline["step"], "The step that the client has told last."),
    ):
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)
    for name, value, text in (
        ("regrow_steps", timeline["steps"], "Executions of the step of the training."),
        ("regrow_steps_lost", timeline["steps_lost"], "How many of them were lost."),
        ("regrow_losses", sum(one["losses"] for one in status["slices"]), "Losses of slices."),
        ("regrow_compilations", status["compiled"], "Programs that were compiled."),
    ):
        yield CounterMetricFamily(name, text, value=value)
    yield from _events(timeline)


def _events(timeline: Mapping[str, Any]) -> Families:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    count = CounterMetricFamily(
        "regrow_elastic_events", "Elastic events that ended.", labels=["kind"]
    )
    for kind, number in sorted(timeline["event_counts"].items()):
        count.add_metric([kind], number)
    yield count
    last = GaugeMetricFamily(
        "regrow_elastic_event_seconds",
        "The latest elastic event by parts.",
        labels=["kind", "part"],
    )
    for event in {one["kind"]: one for one in timeline["events"]}.values():
        parts = {**event["parts"], "in no part": event["rest_s"], "all": event["wall_s"]}
        for part, seconds in parts.items():
            last.add_metric([event["kind"], part], seconds)
    yield last
