"""Many questions that wait at once."""

from __future__ import annotations

import numpy as np
from worker_rig import F32, HostRig

from regrow.channel import commands as c

MORE_THAN_HELPERS = 600


def test_waits_do_not_keep_out_what_they_wait_for() -> None:
    rig = HostRig((4,))
    aid, data = rig.aid(), np.float32(7).tobytes()
    rig.tell(c.Expect(aid, F32, (4,), "device"))
    asked = [
        rig.asked(lambda rid: c.Get(rid, aid, 0, None, None, None))
        for _ in range(MORE_THAN_HELPERS)
    ]
    rig.tell(c.Fill(aid, 0, (1,), data, 0))
    assert all(rig.reports.answer(rid) == c.Reply(rid, data) for rid in asked)
    rig.close()
