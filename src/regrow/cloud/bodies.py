"""Requests for slices, from the flags that gcloud has for them."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from regrow.cloud.names import Place
from regrow.cloud.times import format_time, parse_time
from regrow.errors import UsageError

Json = dict[str, Any]

_DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")
# As it is called in names of accelerators, and by gcloud.
_TYPES: Final = {"V5LITEPOD": "V5LITE_POD", "V5E": "V5LITE_POD"}
_NETWORK: Final = {
    "network": "network",
    "subnetwork": "subnetwork",
    "enable-external-ips": "enableExternalIps",
    "can-ip-forward": "canIpForward",
    "queue-count": "queueCount",
}
_BOOT_DISK: Final = {
    "kms-key": "kmsKeyName",
    "confidential-compute": "enableConfidentialCompute",
    "size-gb": "diskSizeGb",
    "provisioned-iops": "provisionedIops",
    "provisioned-throughput": "provisionedThroughput",
    "source-image": "sourceImage",
    "storage-pool": "storagePool",
}
_HOLDERS: Final = ("project", "folder", "organization")
_UNITS_S: Final = (86400, 3600, 60, 1)


@final
@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """What each slice is to be like.

    Attributes:
        runtime_version: Version of its software.
        accelerator_type: Its shape; or
        type: its generation (V4, say), and
        topology: its topology (2x2x2, say).
        description: For people.
        network: Its network.
        subnetwork: Its part of that.
        range: Its addresses, as CIDR.
        internal_ips: Whether it has no external addresses.
        service_account: Whose rights it has.
        scopes: Which of them.
        shielded_secure_boot: Whether only signed kernels are booted.
        tags: For firewalls.
        labels: For bills.
        metadata: What its metadata server tells.
        data_disks: Disks to attach.
        network_configs: Several networks instead of `network` and `subnetwork`.
        boot_disk: What the boot disk is to be like (v2alpha1, but for its key).
        autocheckpoint_enabled: Whether a program may save its state before a maintenance (v2alpha1).
        spot: Whether it may be preempted.
        preemptible: The same, as it was called earlier.
        reserved: Whether it comes from a reservation.
    """

    runtime_version: str
    accelerator_type: str | None = None
    type: str | None = None
    topology: str | None = None
    description: str | None = None
    network: str = "default"
    subnetwork: str | None = None
    range: str | None = None
    internal_ips: bool = False
    service_account: str | None = None
    scopes: tuple[str, ...] = ()
    shielded_secure_boot: bool = False
    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    data_disks: tuple[Mapping[str, str], ...] = ()
    network_configs: tuple[Mapping[str, str], ...] = ()
    boot_disk: Mapping[str, str] = field(default_factory=dict)
    autocheckpoint_enabled: bool = False
    spot: bool = False
    preemptible: bool = False
    reserved: bool = False

    @property
    def is_alpha(self) -> bool:
        """Whether only v2alpha1 has what it asks for."""
        return self.autocheckpoint_enabled or bool(set(self.boot_disk) - {"kms-key"})

    def body(self) -> Json:
        """As the API takes it.

        Raises:
            UsageError: If the flags do not go together.
        """
        if (self.accelerator_type is None) == (self.type is None and self.topology is None):
            raise UsageError("give --accelerator-type, or --type and --topology")
        if (self.type is None) != (self.topology is None):
            raise UsageError("--type and --topology go together")
        shape: Json = {"acceleratorType": self.accelerator_type}
        if self.accelerator_type is None:
            kind = str(self.type).upper().replace("-", "_")
            config = {"type": _TYPES.get(kind, kind), "topology": self.topology}
            shape = {"acceleratorConfig": config}
        account = {"email": self.service_account, "scope": list(self.scopes)}
        scheduling = {
            name: True for name in ("spot", "preemptible", "reserved") if getattr(self, name)
        }
        return shape | _given(
            runtimeVersion=self.runtime_version,
            description=self.description,
            **self._networks(),
            bootDiskConfig=_boot_disk(self.boot_disk),
            autocheckpointEnabled=self.autocheckpoint_enabled or None,
            cidrBlock=self.range,
            serviceAccount=_given(**account),
            shieldedInstanceConfig={"enableSecureBoot": True}
            if self.shielded_secure_boot
            else None,
            tags=list(self.tags),
            labels=dict(self.labels),
            metadata=dict(self.metadata),
            dataDisks=[_disk(disk) for disk in self.data_disks],
            schedulingConfig=scheduling,
        )

    def _networks(self) -> Json:
        one = {
            "network": self.network,
            "subnetwork": self.subnetwork,
            "enableExternalIps": not self.internal_ips,
        }
        if not self.network_configs:
            return {"networkConfig": _given(**one)}
        if self.subnetwork or self.network != "default":
            raise UsageError("--network-config excludes --network and --subnetwork")
        return {
            "networkConfigs": [
                _named("--network-config", c, _NETWORK) for c in self.network_configs
            ]
        }


def _given(**fields: Any) -> Json:
    """Without what was not given."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _named(flag: str, given: Mapping[str, str], names: Mapping[str, str]) -> Json:
    """Fields of a message, from KEY=VALUE pairs."""
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise UsageError(f"{flag}: {unknown[0]} is none of {', '.join(sorted(names))}")
    words = {"true": True, "false": False}
    return {names[key]: words.get(value.lower(), value) for key, value in given.items()}


def _boot_disk(given: Mapping[str, str]) -> Json:
    config = _named("--boot-disk", given, _BOOT_DISK)
    key = config.pop("kmsKeyName", None)
    return config | ({"customerEncryptionKey": {"kmsKeyName": key}} if key else {})


def _disk(flags: Mapping[str, str]) -> Json:
    modes = {"read-write": "READ_WRITE", "read-only": "READ_ONLY"}
    if set(flags) - {"source", "mode"} or "source" not in flags:
        raise UsageError("--data-disk has the form source=DISK[,mode=read-write|read-only]")
    mode = flags.get("mode", "read-write")
    if mode not in modes:
        raise UsageError(f"--data-disk: mode={mode} is neither read-write nor read-only")
    return {"sourceDisk": flags["source"], "mode": modes[mode]}


@final
@dataclass(frozen=True, kw_only=True)
class QueuedRequest:
    """A request for slices.

    Attributes:
        node: What each is to be like.
        node_id: Id of its one node; or
        node_count: how many nodes, and
        node_prefix: what their ids begin with (default: the id of the request).
        guaranteed: Whether slices are not taken away.
        spot: Whether they may be.
        reserved: Whether they come from a reservation.
        reservation: Which one: its id or full name; default: any.
        reservation_host_project: Whose reservation it is: a project's,
        reservation_host_folder: a folder's, or
        reservation_host_organization: an organization's (default: the place's project's).
        best_effort: Whether its slices may be taken away for any other (v2alpha1).
        provisioning_model: standard, spot, reservation-bound or flex-start (v2alpha1).
        max_run_duration: How long it may have its slices (v2alpha1).
        workload_type: throughput-optimized or availability-optimized (v2alpha1).
        valid_after_duration: Not before this time from now.
        valid_after_time: Not before this time.
        valid_until_duration: Only until this time from now.
        valid_until_time: Only until this time.
    """

    node: NodeRequest
    node_id: str | None = None
    node_count: int | None = None
    node_prefix: str | None = None
    guaranteed: bool = False
    spot: bool = False
    reserved: bool = False
    reservation: str | None = None
    reservation_host_project: str | None = None
    reservation_host_folder: str | None = None
    reservation_host_organization: str | None = None
    best_effort: bool = False
    provisioning_model: str | None = None
    max_run_duration: str | None = None
    workload_type: str | None = None
    valid_after_duration: str | None = None
    valid_after_time: str | None = None
    valid_until_duration: str | None = None
    valid_until_time: str | None = None

    @property
    def is_alpha(self) -> bool:
        """Whether only v2alpha1 has what it asks for."""
        own = (self.best_effort, self.provisioning_model, self.max_run_duration, self.workload_type)
        return any(own) or self.node.is_alpha

    def body(self, place: Place) -> Json:
        """As the API takes it: v2alpha1 if it `is_alpha`, else v2.

        Raises:
            UsageError: If the flags do not go together.
        """
        spec: Json = {"parent": place.name, "node": self.node.body()} | self._ids()
        more: Json = {}
        if self.provisioning_model:
            more["provisioningModel"] = _enum(self.provisioning_model)
        if self.max_run_duration:
            seconds = parse_duration("--max-run-duration", self.max_run_duration)
            more["runDuration"] = {"maxRunDuration": f"{seconds}s"}
        return {"tpu": {"nodeSpec": [spec]}} | self._tier(place) | more | self._policy()

    def _tier(self, place: Place) -> Json:
        tier: Json = {}
        for flag, name in (
            ("guaranteed", "guaranteed"),
            ("spot", "spot"),
            ("best_effort", "bestEffort"),
        ):
            if getattr(self, flag):
                tier[name] = {}
        holders = [one for one in _HOLDERS if getattr(self, f"reservation_host_{one}")]
        if self.reserved or self.reservation or holders:
            tier["reservationName"] = self._reservation(place, holders)
        if len(tier) > 1:
            raise UsageError(
                "--guaranteed, --spot, --best-effort and --reserved exclude each other"
            )
        return tier

    def _reservation(self, place: Place, holders: Sequence[str]) -> str:
        name = self.reservation or "-"
        if "/" in name:
            return name
        if len(holders) > 1:
            raise UsageError("a reservation has one holder: give one --reservation-host-…")
        for holder in holders:
            owner = getattr(self, f"reservation_host_{holder}")
            return f"{holder}s/{owner}/locations/{place.zone}/reservations/{name}"
        return place.child("reservations", name)

    def _ids(self) -> Json:
        if (self.node_id is None) == (self.node_count is None):
            raise UsageError("give --node-id for one slice, or --node-count for several")
        if self.node_count is None:
            for flag in ("node_prefix", "workload_type"):
                if getattr(self, flag) is not None:
                    raise UsageError(f"--{flag.replace('_', '-')} needs --node-count")
            return {"nodeId": self.node_id}
        if self.node_count <= 1:
            raise UsageError(
                f"--node-count={self.node_count}: give at least 2, or --node-id for one slice"
            )
        params = _given(nodeCount=self.node_count, nodeIdPrefix=self.node_prefix)
        if self.workload_type is not None:
            params["workloadType"] = _enum(self.workload_type)
        return {"multiNodeParams" if self.is_alpha else "multisliceParams": params}

    def _policy(self) -> Json:
        after = self._limit("after")
        until = self._limit("until")
        if after and until:
            start, end = (_as_time(*one) for one in (after, until))
            return {"queueingPolicy": {"validInterval": {"startTime": start, "endTime": end}}}
        limits = [
            (f"valid{word}{kind}", text)
            for word, one in (("After", after), ("Until", until))
            if one
            for kind, text in [one]
        ]
        return {"queueingPolicy": dict(limits)} if limits else {}

    def _limit(self, word: str) -> tuple[str, str] | None:
        duration: str | None = getattr(self, f"valid_{word}_duration")
        moment: str | None = getattr(self, f"valid_{word}_time")
        if duration and moment:
            raise UsageError(f"--valid-{word}-duration and --valid-{word}-time exclude each other")
        if duration:
            return "Duration", f"{parse_duration(f'--valid-{word}-duration', duration)}s"
        if moment:
            try:
                parse_time(moment)
            except ValueError as error:
                raise UsageError(f"--valid-{word}-time: {error}") from None
            return "Time", moment
        return None


def _enum(word: str) -> str:
    """An enum's name, from gcloud's word for it."""
    return word.upper().replace("-", "_")


def _as_time(kind: str, text: str) -> str:
    return text if kind == "Time" else format_time(time.time() + float(text.removesuffix("s")))


def parse_duration(flag: str, text: str) -> float:
    """Seconds of a duration as gcloud has it: 3600s, 6h, 1d12h, 90.

    Raises:
        UsageError: If it is none.
    """
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        raise UsageError(f"{flag}={text}: give a duration like 3600s, 6h or 1d12h")
    return sum(
        float(number or 0) * unit_s for number, unit_s in zip(match.groups(), _UNITS_S, strict=True)
    )


_NEXT_KEY: Final = re.compile(r",(?=[\w.-]+=)")


def parse_pairs(flag: str, texts: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE,KEY=VALUE, as gcloud has it; ^:^KEY=VALUE:KEY=VALUE takes another delimiter.

    A comma that no KEY= follows is part of a value.

    Raises:
        UsageError: If a part has no "=".
    """
    pairs: dict[str, str] = {}
    for text in texts:
        parts = _NEXT_KEY.split(text)
        if text.startswith("^") and "^" in text[1:]:
            delimiter, _, rest = text[1:].partition("^")
            parts = rest.split(delimiter) if delimiter else [rest]
        for part in parts:
            key, equals, value = part.partition("=")
            if not equals or not key:
                raise UsageError(f"{flag}: {part!r} is not of the form KEY=VALUE")
            pairs[key] = value
    return pairs
