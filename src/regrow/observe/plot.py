"""The timeline of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from regrow.errors import UsageError
from regrow.observe.timeline import PARTS

_REST: Final = "lightgrey"
_WIDTH: Final = 9.0
_ROW: Final = 0.45
_LEAST_ROWS: Final = 2
_MOST_ROWS: Final = 40
_BUCKETS_HEIGHT: Final = 1.6


def draw(status: Mapping[str, Any], path: str | Path) -> None:
    """Draws the elastic events by their parts, a row each, and the goodput buckets below.

    Args:
        status: What `Run.status` gives.
        path: A PNG file, or of another format that matplotlib knows by its suffix.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise UsageError("a picture needs matplotlib: pip install 'regrow[plots]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot

    events = status["events"][-_MOST_ROWS:]
    rows = max(len(events), _LEAST_ROWS) * _ROW + 1.2
    figure, (top, bottom) = pyplot.subplots(
        2,
        1,
        figsize=(_WIDTH, rows + _BUCKETS_HEIGHT),
        height_ratios=(rows, _BUCKETS_HEIGHT),
        layout="constrained",
    )
    colors = {part: f"C{number}" for number, part in enumerate(PARTS)}
    _draw_events(top, events, colors)
    _draw_buckets(bottom, status)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_events(axes: Any, events: list[dict[str, Any]], colors: Mapping[str, str]) -> None:
    for row, event in enumerate(events):
        axes.broken_barh([(0, event["wall_s"])], (row - 0.4, 0.8), color=_REST)
        for part, spans in event["spans"].items():
            bars = [(begin, end - begin) for begin, end in spans]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colors[part])
    names = [
        f"{event['number']}: {event['kind']} of {', '.join(map(str, event['slices']))}"
        for event in events
    ]
    axes.set_yticks(range(len(events)), names)
    axes.set_ylim(max(len(events), 1) - 0.5, -0.5)
    axes.set_xlabel("seconds since the event began")
    for part, color in {**colors, "in no part": _REST}.items():
        axes.barh([0], [0], color=color, label=part)
    axes.legend(ncols=4, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_buckets(axes: Any, status: Mapping[str, Any]) -> None:
    from matplotlib import colormaps

    left = 0.0
    colors = colormaps["tab20"](range(20))
    for color, (bucket, seconds) in zip(colors, status["buckets"].items(), strict=False):
        if seconds > 0.0:
            axes.barh([0], [seconds], left=[left], color=color, label=bucket)
            left += seconds
    axes.set_xlim(0, max(left, 1e-9))
    axes.set_yticks([])
    axes.set_xlabel(f"seconds of wall time by bucket (goodput {status['goodput']:.1%})")
    axes.legend(ncols=3, fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
