"""A server with everything that guards it: mutual TLS, the admin key; and one in two parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cosytriton_client import Client, ClientError, Voice
from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.health import HealthCheck
from cosytriton_ensemble.tls import open_channel

pytestmark = [pytest.mark.chart, pytest.mark.timeout(600)]

Serve = Callable[..., AbstractContextManager[Any]]
Certificates = Callable[..., Path]
KEY = "0123456789abcdef"
TEXT = "This is voice number five."


@pytest.fixture(scope="module")
def folder(certificates: Certificates) -> Path:
    return certificates()


@pytest.fixture(scope="module")
def guarded(
    serve: Serve, demo_repository: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("guarded")
    (place / "key").write_text(KEY)
    options = (f"--tls={folder}", "--mutual-tls", f"--admin-key={place / 'key'}", "--verify")
    with serve(demo_repository, place / "serve.log", *options) as running:
        yield running


def test_models_and_probes_call_with_the_certificate(guarded: Any, folder: Path, voice: Voice) -> None:
    check = HealthCheck(guarded.grpc_url, 60, folder)
    check.ready()
    check.alive()
    with Client(guarded.grpc_url, tls=folder) as client:
        whole = client.synthesize(TEXT, voice, seed=1)
        assert np.abs(whole.samples).max() > 0.01
        assert sum(chunk.samples.size for chunk in client.stream(TEXT, voice, seed=1)) > 0


@pytest.mark.parametrize("files", [(), ("ca.crt",)])
def test_a_caller_without_a_certificate_is_refused(
    guarded: Any, folder: Path, tmp_path: Path, files: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    tls = tmp_path if files else None
    with pytest.raises(ServerError):
        HealthCheck(guarded.grpc_url, 5, tls).alive()
    with pytest.raises(ClientError), Client(guarded.grpc_url, tls=tls) as client:
        client.synthesize("one", "nobody")


def test_a_server_of_another_authority_is_refused(guarded: Any, certificates: Certificates) -> None:
    with pytest.raises(ServerError):
        HealthCheck(guarded.grpc_url, 5, certificates()).alive()


@pytest.mark.parametrize(
    "ask",
    [
        lambda stub, key: stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), metadata=key),
        lambda stub, key: stub.SystemSharedMemoryStatus(
            service_pb2.SystemSharedMemoryStatusRequest(), metadata=key
        ),
        lambda stub, key: stub.LogSettings(service_pb2.LogSettingsRequest(), metadata=key),
        lambda stub, key: stub.TraceSetting(service_pb2.TraceSettingRequest(), metadata=key),
    ],
    ids=["models", "shared memory", "logging", "traces"],
)
def test_changing_the_server_needs_the_key(guarded: Any, folder: Path, ask: Callable[..., Any]) -> None:
    with open_channel(guarded.grpc_url, folder) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for key in ((), (("triton-grpc-protocol-admin-key", "wrong"),)):
            with pytest.raises(grpc.RpcError, match="restricted"):
                ask(stub, key)
        ask(stub, (("triton-grpc-protocol-admin-key", KEY),))


def test_in_two_parts_it_says_the_same(
    serve: Serve, demo_repository: Path, guarded: Any, folder: Path, voice: Voice, tmp_path: Path
) -> None:
    """The language model in a server of its own, everything else in another that calls it, all with TLS."""
    tls = (f"--tls={folder}", "--mutual-tls")
    with (
        serve(demo_repository, tmp_path / "lm.log", "--part=lm", *tls) as lm,
        serve(
            demo_repository, tmp_path / "sound.log", "--part=sound", f"--lm-url={lm.grpc_url}", *tls
        ) as sound,
    ):
        for server in (lm, sound):
            HealthCheck(server.grpc_url, 60, folder).alive()
        with Client(guarded.grpc_url, tls=folder) as one, Client(sound.grpc_url, tls=folder) as two:
            whole, parted = (client.synthesize(TEXT, voice, seed=5).samples for client in (one, two))
        np.testing.assert_array_equal(whole, parted)
        with pytest.raises(ClientError), Client(lm.grpc_url, tls=folder) as client:
            client.synthesize(TEXT, voice)
