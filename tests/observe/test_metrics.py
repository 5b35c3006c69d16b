"""Metrics in the text format of Prometheus, and the picture."""

from __future__ import annotations

from recorded_training import trained

from regrow.observe.metrics import families
from regrow.observe.plot import draw


def eventful():
    training = trained(6)
    training.lose()
    training.load()
    training.step(4, slices=(0,))
    return training.run.status(training.now)


def test_metrics() -> None:
    slices = [{"state": "up", "losses": 0}, {"state": "lost", "losses": 1}]
    status = {"timeline": eventful(), "slices": slices, "clients": 1, "compiled": 3}
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(status, ("up", "lost", "suspended"))
        for sample in family.samples
    }
    assert found["regrow_slices", "up"] == found["regrow_slices", "lost"] == 1
    assert found["regrow_slices", "suspended"] == 0
    assert found["regrow_steps_total",] == 7
    assert found["regrow_steps_lost_total",] == 2
    assert found["regrow_elastic_events_total", "loss"] == 1
    assert found["regrow_elastic_event_seconds", "loss", "load"] == 2
    assert found["regrow_seconds_total", "PRODUCTIVE"] == 3
    assert found["regrow_losses_total",] == 1
    assert found["regrow_step",] == 4


def test_a_picture(tmp_path) -> None:
    path = tmp_path / "timeline.png"
    draw(eventful(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    empty = trained(2)
    draw(empty.run.status(empty.now), path)
    assert path.stat().st_size > 1000
