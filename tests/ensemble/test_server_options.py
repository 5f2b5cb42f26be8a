"""What the options of `serve` become: flags of tritonserver, and the environment of its models."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from cosytriton_ensemble import server
from cosytriton_ensemble.commands import SERVE
from cosytriton_ensemble.errors import InputError, RepositoryError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.names import LM_VARIABLE, LOOPBACK_VARIABLE, TLS_VARIABLE
from cosytriton_ensemble.repository import check_skeleton, write_repository
from cosytriton_ensemble.server import Part, ServerOptions
from cosytriton_ensemble.tls import Tls

HERE = Path("models")


def test_each_endpoint_has_its_own_address() -> None:
    options = ServerOptions(HERE, host="0.0.0.0", metrics_host="10.0.0.1", metrics_port=9)
    flags = options.flags()
    assert {"--grpc-address=0.0.0.0", "--http-address=127.0.0.1", "--metrics-address=10.0.0.1"} <= set(flags)
    assert options.metrics_url == "http://10.0.0.1:9"
    assert options.grpc_url == "127.0.0.1:8001"
    assert ServerOptions(HERE, host="0.0.0.0").metrics_url == "http://127.0.0.1:8002"
    assert "--metrics-address=0.0.0.0" in ServerOptions(HERE, host="0.0.0.0").flags()


def test_certificates_know_names_and_no_addresses() -> None:
    options = ServerOptions(HERE, host="0.0.0.0", tls=Tls(Path("/tls")))
    assert options.grpc_url == "localhost:8001"
    assert options.variables()[LOOPBACK_VARIABLE] == "localhost:8001"
    assert options.variables()[TLS_VARIABLE] == "/tls"


def test_nothing_is_told_of_what_was_not_asked_for() -> None:
    options = ServerOptions(HERE)
    assert not {LM_VARIABLE, TLS_VARIABLE} & options.variables().keys()
    assert not [flag for flag in options.flags() if "ssl" in flag or "trace" in flag or "restricted" in flag]


def test_traces_are_handed_to_triton_as_they_are() -> None:
    settings = ("mode=opentelemetry", "opentelemetry,url=http://collector:4318/v1/traces")
    flags = ServerOptions(HERE, trace=settings).flags()
    assert [flag for flag in flags if "trace" in flag] == [
        f"--trace-config={setting}" for setting in settings
    ]


def test_the_admin_key_restricts_both_protocols(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    restricted = "model-repository,shared-memory,logging,trace:admin-key=0123456789abcdef"
    flags = ServerOptions(HERE, admin_key=file).flags()
    assert f"--grpc-restricted-protocol={restricted}" in flags
    assert f"--http-restricted-api={restricted}" in flags


@pytest.mark.parametrize("key", ["", "short", "0123456789 abcdef", "0123456789abcdef=", "a" * 15])
def test_a_weak_admin_key_or_one_that_headers_change_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "key").write_text(key)
    with pytest.raises(InputError, match="at least 16 letters"):
        ServerOptions(HERE, admin_key=tmp_path / "key").flags()


@pytest.mark.parametrize(("part", "url"), [("sound", None), ("all", "lm:8001"), ("lm", "lm:8001")])
def test_only_the_part_without_the_language_model_is_told_where_it_is(part: Part, url: str | None) -> None:
    with pytest.raises(InputError, match="needs --lm-url"):
        server._check_part(ServerOptions(HERE, part=part, lm_url=url))


@pytest.mark.parametrize(
    ("part", "has", "lacks"),
    [("lm", {"speech_lm"}, {"flow", "tts"}), ("sound", {"flow", "tts", "voice_encoder"}, {"speech_lm"})],
)
def test_a_part_loads_its_models_alone(
    monkeypatch: pytest.MonkeyPatch, part: Part, has: set[str], lacks: set[str]
) -> None:
    monkeypatch.setattr(server, "family_of", lambda _: COSYVOICE2)
    mode, *loads = server._loads(ServerOptions(HERE, part=part))
    names = {load.removeprefix("--load-model=") for load in loads}
    assert mode == "--model-control-mode=explicit"
    assert has <= names
    assert not lacks & names
    assert server._loads(ServerOptions(HERE)) == []


def test_mutual_tls_without_files_is_refused() -> None:
    parser = argparse.ArgumentParser()
    SERVE.arguments(parser)
    with pytest.raises(InputError, match="--mutual-tls needs --tls"):
        SERVE.run(parser.parse_args(["--mutual-tls"]))


@pytest.mark.parametrize("changed", ["flow/config.pbtxt", "speech_lm/1/model.py", "flow/configs/gpu.pbtxt"])
def test_code_or_configuration_that_is_not_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setattr("cosytriton_ensemble.repository.family_of", lambda _: COSYVOICE2)
    write_repository(tmp_path)
    check_skeleton(tmp_path)
    file = tmp_path / changed
    file.write_text(file.read_text() + "\n")
    with pytest.raises(RepositoryError, match=rf"{changed} is not what this version writes.*--verify"):
        check_skeleton(tmp_path)
