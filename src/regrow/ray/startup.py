"""The startup script with which the hosts of a TPU join a Ray cluster."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from regrow.errors import UsageError
from regrow.ray.settings import START_ENVIRON

NAMESPACE: Final = "regrow"
"""Of the guest attributes by which a host tells how its script went."""
RESULT_KEY: Final = "ray-join"
AGAIN_VARIABLE: Final = "REGROW_JOIN_AGAIN"
"""Set where a host is told to join again: whoever tells it may be killed, and cannot take back then that
something is under way."""
GENERATION_KEY: Final = "regrow-generation"
"""Metadata of a TPU: names its set of hosts, and the resources of exactly these."""

_START: Final = Path(__file__).with_name("start.py")
# The Cloud TPU API takes ~, + and %, too, and any of them first and last: labels of Ray do not.
_TPU_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,46}[A-Za-z0-9])?")
_ADDRESS: Final = re.compile(r"[A-Za-z0-9_.\[\]:-]+:\d{1,5}")

_SCRIPT: Final = """\
#!/bin/bash
ask() {{
  curl -sf --max-time 20 -H 'Metadata-Flavor: Google' \\
    "http://${{GCE_METADATA_HOST:-metadata.google.internal}}/computeMetadata/v1/instance/$1"
}}
tell() {{
  curl -sf --max-time 20 -X PUT -H 'Metadata-Flavor: Google' --data "$2" \\
    "http://${{GCE_METADATA_HOST:-metadata.google.internal}}/computeMetadata/v1/instance/guest-attributes/{namespace}/$1"
}}
worker=$(ask attributes/agent-worker-number)
slice=$(ask attributes/tpu-env | sed -n "s/^MEGASCALE_SLICE_ID: '\\(.*\\)'$/\\1/p")
address=$(ask network-interfaces/0/ip)
rank=$(( ${{slice:-0}} * {hosts_per_slice} + ${{worker:-0}} ))
log=$(mktemp)
# Nothing is left of it even if this script is killed.
exec 9<>"$log"
rm -f "$log"
log=/dev/fd/9
[ -n "${again}" ] || tell {result} "running"
(
  set -e
{prepare}
{own}
{join}
) >"$log" 2>&1
status=$?
cat "$log"
# Ray tells on several lines which versions differ.
line=$(grep -m 1 -A 5 ' Version mismatch' "$log" | tr -s '\\n ' '  ')
[ -n "$line" ] || line=$(sed 's/\\x1b\\[[0-9;]*m//g' "$log" | grep -E '([Ee]rror|ERROR|mismatch|not found|[Ff]ailed|No such)' | tail -n 1)
[ -n "$line" ] || line=$(tail -n 1 "$log")
tell {result} "$status ${{line:0:400}}"
exit $status
"""

# One that hangs, or that is of a head which is no more, would come back beside the new one.
_LOCAL_END: Final = (
    '  pkill -KILL -f -- "/raylet .*--node_ip_address=$address( |\\$)" || [ $? = 1 ]\n'
)
_REAL_END: Final = "  ray stop --force >/dev/null\n"

# A host of the local Cloud TPU shares this machine and its Ray with us.
_LOCAL_PREPARE: Final = "  export PATH={path}:$PATH"
_REAL_PREPARE: Final = """\
  mount -o remount,size=100g /dev/shm
  for pause in 5 10 0; do
    pip3 install --quiet 'ray[default]=={version}' && break
    [ "$pause" != 0 ] && sleep "$pause"
  done"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How the hosts of a TPU are to join.

    Attributes:
        tpu: Name of the TPU.
        generation: Names this set of its hosts.
        hosts_per_slice: Hosts of each of its slices.
        head: HOST:PORT of the Ray cluster.
        ray_version: The version of Ray that the cluster has.
        local: Whether the hosts are those of the local Cloud TPU.
        chips: TPU chips of each host, which Ray finds by itself on real ones.
        script: What is run before, on every host; a shell script.
    """

    tpu: str
    generation: str
    hosts_per_slice: int
    head: str
    ray_version: str
    local: bool
    chips: int = 0
    script: str = ""

    def text(self) -> str:
        """The startup script.

        Raises:
            UsageError: If the address is none, or the name cannot be that of a resource.
        """
        if not _ADDRESS.fullmatch(self.head):
            raise UsageError(f"{self.head!r} is no address of a Ray cluster: give HOST:PORT")
        check_tpu_name(self.tpu)
        prepare = _LOCAL_PREPARE if self.local else _REAL_PREPARE
        python = Path(sys.executable)
        own = f"  bash -c {shlex.quote(self.script)}" if self.script else "  :"
        return _SCRIPT.format(
            namespace=NAMESPACE,
            result=RESULT_KEY,
            again=AGAIN_VARIABLE,
            hosts_per_slice=self.hosts_per_slice,
            prepare=prepare.format(path=shlex.quote(str(python.parent)), version=self.ray_version),
            own=own,
            join=self._join(str(python)),
        )

    def _join(self, python: str) -> str:
        program = "ray start"
        if self.local:
            # By its path: what hosts run must not have our modules in front of its own.
            program = f"{shlex.quote(python)} -P {shlex.quote(str(_START))}"
        everyone = tpu_resource(self.tpu)
        rank = rank_resource(self.tpu, self.generation, "'$rank'")
        chips = f', "TPU": {self.chips}' if self.local and self.chips else ""
        resources = f'{{"{everyone}": 1, "{rank}": 1{chips}}}'
        words = [
            f"{program} --disable-usage-stats",
            f"--address={self.head} --node-ip-address=$address",
            "--include-log-monitor=false",
            f"--resources='{resources}'",
            f"--labels=regrow-tpu={self.tpu},regrow-generation={self.generation},regrow-rank=$rank",
        ]
        environ = " ".join(f"{name}={value}" for name, value in START_ENVIRON.items())
        end = _LOCAL_END if self.local else _REAL_END
        return f"{end}  {environ} \\\n    " + " \\\n    ".join(words)


def check_tpu_name(name: str) -> str:
    """Returns a name that a TPU, a resource of Ray and a label can have.

    Raises:
        UsageError: If it cannot.
    """
    if not _TPU_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a TPU on a Ray cluster: use letters, digits, '-', '_' and '.', "
            "with a letter or digit first and last, 48 at most"
        )
    return name


def tpu_resource(tpu: str) -> str:
    """The resource of Ray of which every host of a TPU has 1."""
    return f"{tpu}_tpu_host"


def rank_resource(tpu: str, generation: str, rank: int | str) -> str:
    """The resource that exactly one host of one generation of a TPU has."""
    return f"{tpu}_{generation}_{rank}"
