"""The environment of a rank -> its settings, and clear words for what cannot work."""

from __future__ import annotations

import os
import traceback

import pytest

from ftcomm.control.timeouts import Timeouts
from ftcomm.engines import registry
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.settings import Settings, credentials, split_endpoint
from ftcomm.settings.engines import AUTO, ENGINES, KINDS

GOOD = {
    "FTCOMM_COORDINATOR": "127.0.0.1:29400",
    "FTCOMM_TOKEN": "secret",
    "FTCOMM_REPLICA": "2",
    "FTCOMM_REPLICAS": "4",
}


def test_the_least_that_is_needed() -> None:
    settings = Settings.from_env(GOOD)
    assert settings == Settings(coordinator="127.0.0.1:29400", token="secret", replica=2, replicas=4, host="")
    assert (settings.shard, settings.ranks_per_replica, settings.leader_fd, settings.transport) == (0, 1, None, "auto")


def test_there_is_an_engine_of_every_name() -> None:
    assert registry.OPENERS.keys() == KINDS.keys() > {AUTO, *ENGINES} - {"auto"}


def test_everything() -> None:
    settings = Settings.from_env(
        {
            **GOOD,
            "FTCOMM_SHARD": "1",
            "FTCOMM_RANKS_PER_REPLICA": "2",
            "FTCOMM_LEADER": "[::1]:4000",
            "FTCOMM_LEADER_FD": "7",
            "FTCOMM_TRANSPORT": "tcp",
            "FTCOMM_HOST": "10.0.0.1",
            "FTCOMM_RACK": "row 3/7",
            "FTCOMM_HEARTBEAT_TIMEOUT": "1.5",
            "FTCOMM_OP_TIMEOUT": "9",
            "FTCOMM_INIT_TIMEOUT": "3",
        }
    )
    assert (settings.shard, settings.ranks_per_replica, settings.leader, settings.leader_fd) == (1, 2, "[::1]:4000", 7)
    assert (settings.transport, settings.host, settings.rack) == ("tcp", "10.0.0.1", "row 3/7")
    assert (settings.timeouts, settings.init_timeout) == (Timeouts.derive(9.0, 1.5), 3.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"FTCOMM_COORDINATOR": None}, "ftcomm run --replicas 4"),
        ({"FTCOMM_ALGORITHM": "tree"}, "FTCOMM_ALGORITHM='tree'; expected one of auto, direct, ring"),
        (
            {"FTCOMM_ALGORITHM": "ring", "FTCOMM_ENGINE": "gpu-kernel"},
            "FTCOMM_ALGORITHM=ring with FTCOMM_ENGINE=gpu-kernel, whose kernels run whole ops and read",
        ),
        ({"FTCOMM_RACK": "r" * 257}, "FTCOMM_RACK has 257 characters, at most 256"),
        ({"FTCOMM_COORDINATOR": "nowhere"}, "FTCOMM_COORDINATOR='nowhere'; expected host:port"),
        ({"FTCOMM_COORDINATOR": "host:0"}, "expected host:port"),
        ({"FTCOMM_COORDINATOR": "host:65536"}, "expected host:port"),
        ({"FTCOMM_TOKEN": None}, "FTCOMM_TOKEN is empty"),
        ({"FTCOMM_REPLICA": None}, "FTCOMM_REPLICA=0"),
        ({"FTCOMM_REPLICA": "two"}, "FTCOMM_REPLICA='two'; expected an integer"),
        ({"FTCOMM_REPLICA": "-1"}, "expected a replica number from 0"),
        ({"FTCOMM_REPLICAS": "0"}, "of which there is at least one"),
        ({"FTCOMM_SHARD": "1"}, "expected the index of the rank in its replica, 0 to 0"),
        ({"FTCOMM_RANKS_PER_REPLICA": "2"}, "FTCOMM_SHARD is not set"),
        (
            {"FTCOMM_REPLICAS": "17", "FTCOMM_ENGINE": "gpu-kernel"},
            "FTCOMM_REPLICAS=17 with FTCOMM_ENGINE=gpu-kernel, whose kernels have room for 16 replicas; set",
        ),
        ({"FTCOMM_ENGINE": "gpu"}, "FTCOMM_ENGINE='gpu'; expected one of auto, host, gpu-reduce, gpu-kernel"),
        ({"FTCOMM_ENGINE": "cuda"}, "FTCOMM_ENGINE='cuda'; expected one of auto, host, gpu-reduce, gpu-kernel."),
        (
            {"FTCOMM_ENGINE": "interpreter-kernel", "FTCOMM_VERIFY": "1"},
            "do not compare results yet; unset FTCOMM_VERIFY, or set FTCOMM_ENGINE=interpreter-reduce or host",
        ),
        *(
            (
                {"FTCOMM_ENGINE": "gpu-kernel", "FTCOMM_TRANSPORT": transport},
                f"FTCOMM_TRANSPORT={transport} with FTCOMM_ENGINE=gpu-kernel, whose kernels run whole ops and need",
            )
            for transport in ("tcp", "nixl")
        ),
        ({"FTCOMM_STAGING": "host"}, "unset it, or set FTCOMM_ENGINE=gpu-kernel"),
        (
            {"FTCOMM_STAGING": "host", "FTCOMM_ENGINE": "gpu-reduce"},
            "FTCOMM_STAGING=host with FTCOMM_ENGINE=gpu-reduce",
        ),
        ({"FTCOMM_DATA": "rot13"}, "FTCOMM_DATA='rot13'; expected one of none, mac, aes-gcm"),
        ({"FTCOMM_DATA": "mac", "FTCOMM_TRANSPORT": "nixl"}, "set FTCOMM_TRANSPORT=tcp, or unset FTCOMM_DATA"),
        ({"FTCOMM_JOB": "j" * 257}, "FTCOMM_JOB has 257 characters, at most 256"),
        ({"FTCOMM_TLS_CERT": "cert.pem"}, "TLS needs FTCOMM_TLS_CERT and FTCOMM_TLS_KEY"),
        ({"FTCOMM_TLS_CA": "ca.pem"}, "TLS needs FTCOMM_TLS_CERT and FTCOMM_TLS_KEY"),
        ({"FTCOMM_SMS": "0"}, "FTCOMM_SMS=0; expected at least 1"),
        ({"FTCOMM_RANKS_PER_REPLICA": "2", "FTCOMM_SHARD": "0"}, "FTCOMM_LEADER is not set"),
        (
            {"FTCOMM_RANKS_PER_REPLICA": "2", "FTCOMM_SHARD": "0", "FTCOMM_LEADER": "x"},
            "FTCOMM_LEADER='x'; expected host:port",
        ),
        (
            {"FTCOMM_HOST_AGENT": "127.0.0.1:1"},
            "FTCOMM_HOST_AGENT=127.0.0.1:1 with FTCOMM_HOST_RANKS=0; set that to how many ranks",
        ),
        ({"FTCOMM_HOST_AGENT": "x", "FTCOMM_HOST_RANKS": "2"}, "FTCOMM_HOST_AGENT='x'; expected host:port"),
        ({"FTCOMM_TRANSPORT": "pigeon"}, "expected one of auto, shm, nixl, tcp"),
        ({"FTCOMM_OP_TIMEOUT": "0"}, "FTCOMM_OP_TIMEOUT='0'; expected a positive number of seconds"),
        ({"FTCOMM_OP_TIMEOUT": "soon"}, "expected a positive number of seconds"),
        ({"FTCOMM_OP_TIMEOUT": "inf"}, "expected a positive number of seconds"),
        ({"FTCOMM_OP_TIMEOUT": "nan"}, "expected a positive number of seconds"),
        ({"FTCOMM_OP_TIMEOUT": "5", "FTCOMM_HEARTBEAT_TIMEOUT": "5"}, "Raise the first or lower the second"),
    ],
)
def test_what_cannot_work_is_told_with_its_mend(change: dict[str, str | None], said: str) -> None:
    environment = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(SettingsError) as caught:
        Settings.from_env(environment)
    assert said in str(caught.value)
    assert isinstance(caught.value, FtcommError)
    assert "\n" not in str(caught.value)


def test_the_real_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    assert Settings.from_env().replica == 2


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("127.0.0.1:1", ("127.0.0.1", 1)), ("node-3.cluster:65535", ("node-3.cluster", 65535)), ("[::1]:80", ("::1", 80))],
)
def test_split_endpoint(endpoint: str, expected: tuple[str, int]) -> None:
    assert split_endpoint(endpoint, "X") == expected


def test_what_protects_the_connections() -> None:
    env = {**GOOD, "FTCOMM_JOB": "mine", "FTCOMM_TLS_CERT": "a", "FTCOMM_TLS_KEY": "b", "FTCOMM_DATA": "aes-gcm"}
    settings = Settings.from_env(env)
    assert (settings.job, settings.tls, settings.data) == ("mine", ("a", "b", ""), "aes-gcm")


def test_files_of_tls_that_do_not_serve_are_an_error_of_the_settings() -> None:
    settings = Settings.from_env({**GOOD, "FTCOMM_TLS_CERT": "/no/cert.pem", "FTCOMM_TLS_KEY": "/no/key.pem"})
    with pytest.raises(SettingsError, match=r"FTCOMM_TLS_CERT=/no/cert\.pem: No such file"):
        credentials.of(settings)


def test_data_without_what_it_needs_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'ftcomm\[secure\]'"):
        Settings.from_env({**GOOD, "FTCOMM_DATA": "mac"})


def test_a_token_of_bytes_is_refused_and_never_shown() -> None:
    token = os.fsdecode(b"a secret that is long enough\xff\xfe")  # as Python gives an environment that is no UTF-8
    with pytest.raises(SettingsError, match="openssl rand -hex 16") as refused:
        credentials.from_env(token, {})
    shown = "".join(traceback.format_exception(refused.value))
    assert "a secret" not in shown + repr(refused.value.__context__)


@pytest.mark.parametrize(("token", "warns"), [("x" * 15, True), ("x" * 16, False)])
def test_a_short_token_is_warned_of_and_never_shown(token: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    made = credentials.from_env(token, {})
    assert ("openssl rand -hex 16" in caplog.text) == warns
    assert token not in caplog.text + repr(made) + repr(Settings.from_env({**GOOD, "FTCOMM_TOKEN": token}))
