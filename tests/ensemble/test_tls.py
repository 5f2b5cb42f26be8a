"""TLS files are refused before anything starts where a caller would be refused later."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cosytriton_ensemble.errors import ServerError
from cosytriton_ensemble.tls import Tls, open_channel

Certificates = Callable[..., Path]

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.mark.parametrize("mutual", [False, True])
def test_files_that_fit_are_taken(certificates: Certificates, mutual: bool) -> None:
    folder = certificates()
    tls = Tls(folder, mutual)
    tls.check("localhost")
    assert f"--grpc-server-cert={folder / 'tls.crt'}" in tls.flags()
    assert (f"--grpc-root-cert={folder / 'ca.crt'}" in tls.flags()) is mutual


@pytest.mark.parametrize(
    ("settings", "mutual", "message"),
    [
        ({"name": "cosytriton.speech"}, False, "not valid for 'localhost'"),
        ({"usage": "serverAuth"}, True, "unsuitable|unsupported|purpose"),
        ({"usage": "clientAuth"}, False, "unsuitable|unsupported|purpose"),
        ({"days": 0}, False, "expired"),
    ],
)
def test_a_certificate_that_callers_would_refuse_is_refused_first(
    certificates: Certificates, settings: dict[str, str | int], mutual: bool, message: str
) -> None:
    with pytest.raises(ServerError, match=message):
        Tls(certificates(**settings), mutual).check("localhost")


def test_a_certificate_for_servers_alone_is_enough_where_clients_show_none(
    certificates: Certificates,
) -> None:
    Tls(certificates(usage="serverAuth")).check("localhost")


@pytest.mark.parametrize(("missing", "mutual"), [("tls.crt", False), ("tls.key", False), ("ca.crt", True)])
def test_a_missing_file_is_an_error_that_names_what_is_needed(
    certificates: Certificates, missing: str, mutual: bool
) -> None:
    folder = certificates()
    (folder / missing).unlink()
    with pytest.raises(ServerError, match=r"No such file.*tls\.crt, tls\.key and.*ca\.crt"):
        Tls(folder, mutual).check("localhost")


def test_the_key_of_another_certificate_is_refused(certificates: Certificates) -> None:
    folder, other = certificates(), certificates()
    shutil.copy(other / "tls.key", folder)
    with pytest.raises(ServerError, match="(?i)key values mismatch"):
        Tls(folder).check("localhost")


def test_a_proxy_for_the_internet_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with open_channel(f"localhost:{port}", None) as channel:
            grpc.channel_ready_future(channel).result(timeout=20)
    finally:
        server.stop(None).wait()
