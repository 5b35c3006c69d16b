"""A step that takes too long ends its process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from regrow.errors import UsageError
from regrow.multihost import StepDeadline


def run(body: str) -> subprocess.CompletedProcess[str]:
    code = "import time\nfrom regrow.multihost import StepDeadline\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_it_tells_what_it_was_at() -> None:
    done = run(
        """
        def read_data():
            time.sleep(50)

        with StepDeadline(0.3, first_s=30) as deadline:
            deadline.begin("step 0")
            time.sleep(0.5)
            deadline.begin("step 1")
            read_data()
        """
    )
    assert done.returncode == 124
    assert "regrow: step 1 has not ended within 0.3 s; this process ends\n" in done.stderr
    assert "read_data" in done.stderr


def test_it_is_over_at_the_end() -> None:
    done = run(
        """
        with StepDeadline(0.2, first_s=30) as deadline:
            for step in range(3):
                deadline.begin(f"step {step}")
        time.sleep(0.5)
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 0 seconds"):
        StepDeadline(0)
