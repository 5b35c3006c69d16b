"""A pytest plugin that tells of each test in a file as it goes, so that nothing is lost by an abort.

Lines of JSON go to the file that the variable RECORD_TESTS names.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

_ERROR_CHARS = 3000
_outcomes: dict[str, dict[str, Any]] = {}


def _tell(**line: Any) -> None:
    with open(os.environ["RECORD_TESTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        for item in session.items:
            _tell(test=item.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tell(cannot_collect=report.nodeid, error=report.longreprtext[-_ERROR_CHARS:])


def pytest_runtest_logstart(nodeid: str) -> None:
    _outcomes[nodeid] = {"outcome": "passed", "seconds": 0.0, "error": ""}
    _tell(started=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = _outcomes[report.nodeid]
    outcome["seconds"] += report.duration
    if report.outcome != "passed":
        outcome["outcome"] = report.outcome
        outcome["error"] = report.longreprtext[-_ERROR_CHARS:]


def pytest_runtest_logfinish(nodeid: str) -> None:
    _tell(ended=nodeid, **_outcomes.pop(nodeid))
