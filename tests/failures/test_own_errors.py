"""Programs across slices that fail by themselves: their own error, for all that depend on them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from failure_own import ROUNDS, TEXT

from regrow import LocalCluster
from regrow.errors import SLICE_DOWN_WORDS

SCRIPT = Path(__file__).with_name("failure_own.py")
SLICES = 3


def test_a_program_that_fails_by_itself_tells_its_own_error_on_every_slice(tmp_path: Path) -> None:
    with LocalCluster(SLICES, 1, home=tmp_path) as cluster:
        before = [one.pids for one in cluster.slices]
        client = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env=os.environ | cluster.env | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=100,
            check=True,
        )
        assert [one.pids for one in cluster.slices] == before
    seen = json.loads(client.stdout)
    own = TEXT.replace("INTERNAL", "internal")
    for kind, count in (("failed", SLICES + 1), ("derived", 1)):
        assert sum(seen[kind].values()) == ROUNDS * count
        for text in seen[kind]:
            assert own in text
            assert not any(word in text for word in SLICE_DOWN_WORDS), text
    # What was in flight besides may be lost with it, and says why.
    for text in seen["innocent"]:
        lost = re.match(r"DATA_LOSS: slice 0 gave up its collective links .*; all of them", text)
        assert text == "nothing was raised" or (lost and own[:40] in text), text
