"""What this machine cannot do is refused before anything runs."""

from __future__ import annotations

import pytest

from regrow.chaos import ability, parse_schedule
from regrow.errors import UsageError


def test_this_machine_can_make_every_fault() -> None:
    ability.check_possible(parse_schedule("diskfull:0@1s,oom:0@1s,clockjump:0@1s,kill:0@1s"))


def test_what_it_cannot_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ability.shutil, "which", lambda name: None)
    monkeypatch.setattr(ability.os, "access", lambda path, mode: False)

    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ability.ctypes, "CDLL", no_library)
    ability.check_possible(parse_schedule("kill:0@1s,cutlink:0@1s"))
    for fault, lacks in (("diskfull", "/dev/full"), ("oom", "libstdc"), ("clockjump", "no sh")):
        schedule = parse_schedule(f"kill:0@1s,{fault}:0@phase=load")
        with pytest.raises(UsageError, match=f"cannot make the fault {fault}:0@.*{lacks}"):
            ability.check_possible(schedule)


def test_nodes_of_ray_are_killed_where_slices_come_from_it() -> None:
    schedule = parse_schedule("killnode:0@1s")
    ability.check_possible(schedule, ray=True)
    with pytest.raises(UsageError, match=r"killnode:0@1.0s needs slices from a Ray cluster"):
        ability.check_possible(schedule)
