from __future__ import annotations

import dataclasses
import json

import pytest

from regrow.config import HeadConfig, TcpConfig, check_name
from regrow.errors import UsageError

PLACES = {
    "name": "one",
    "run_id": "abc",
    "home": "/h",
    "dir": "/h/clusters/one",
    "socket_dir": "/h/clusters/one",
}


def config(**changes) -> HeadConfig:
    return HeadConfig(**(PLACES | changes))


def test_json_and_back():
    for one in (
        config(),
        config(tcp=TcpConfig("127.0.0.1", 0, "secret"), restore_after_s=1.5, lifeline_fd=7),
        config(tcp=TcpConfig("::", 29000), allow_no_token=True, num_elastic_instances=0),
    ):
        assert HeadConfig.from_json(one.to_json()) == one


def test_places():
    one = config(socket_dir="/run/short")
    assert one.target == "grpc://unix:/run/short/client.sock"
    assert one.worker_socket == "/run/short/workers.sock"
    assert one.epoch_socket == "/run/short/epochs.sock"
    assert one.control_socket == "/run/short/control.sock"
    assert one.log_dir == "/h/clusters/one/logs"
    assert config(logs="/logs").log_dir == "/logs"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"slices": 0}, "slices is 0"),
        ({"slices": True}, "slices is True"),
        ({"devices_per_slice": 2.0}, "devices_per_slice is 2.0"),
        ({"devices_per_slice": 3, "hosts_per_slice": 2}, "cannot be shared out evenly to 2 hosts"),
        ({"slices": 4097, "devices_per_slice": 1}, "more than the 4096 devices"),
        ({"num_elastic_instances": -1}, "num_elastic_instances is -1"),
        ({"hang_after_s": 0}, "hang_after_s is 0"),
        ({"reconnect_s": float("nan")}, "reconnect_s is nan"),
        ({"start_deadline_s": "5"}, "start_deadline_s is '5'"),
        ({"restore_after_s": -0.1}, "restore_after_s is -0.1"),
        ({"tcp": TcpConfig("127.0.0.1", 1)}, "need a token"),
        ({"tcp": TcpConfig("127.0.0.1", 65536, "t")}, "no TCP port"),
        ({"log_level": "loud"}, "log level 'loud'"),
        ({"name": "../up"}, "cannot be the name"),
        ({"socket_dir": "/x" * 50}, "too long a path"),
    ],
)
def test_what_is_out_of_range_is_refused(changes, text):
    with pytest.raises(UsageError, match=text):
        config(**changes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ("{}", "missing"),
        (json.dumps(PLACES | {"color": "red"}), "color"),
        (json.dumps(PLACES | {"tcp": {"port": 1}}), "host"),
        (json.dumps(PLACES | {"slices": -1}), "slices is -1"),
    ],
)
def test_a_wrong_file_is_one_clear_error(text, error, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=error):
        HeadConfig.load(tmp_path / "config.json")


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        HeadConfig.load(tmp_path / "config.json")


def test_names():
    for name in ("a", "A-1", "run_2.x", "0"):
        assert check_name(name) == name
    for name in ("", ".", "-a", "a/b", "a b", "a" * 65, "ä"):
        with pytest.raises(UsageError, match="cannot be the name"):
            check_name(name)


def test_a_configuration_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().slices = 3
