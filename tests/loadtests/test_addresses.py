from __future__ import annotations

import pytest

from cosytriton_loadtests.addresses import Addresses
from cosytriton_loadtests.errors import LoadTestError


@pytest.mark.parametrize(
    ("grpc", "http", "host"),
    [
        ("localhost:8001", "http://localhost:8000", "localhost"),
        ("grpc://tts.example:9001", "http://tts.example:8000", "tts.example"),
        ("[::1]:8001", "http://[::1]:8000", "[::1]"),
    ],
)
def test_http_is_on_the_same_host(grpc: str, http: str, host: str) -> None:
    addresses = Addresses(grpc)
    assert addresses.of("grpc") == addresses.of("grpc-stream") == grpc
    assert addresses.of("http") == addresses.of("http-stream") == http
    assert addresses.host == host


def test_an_address_of_http_may_be_given() -> None:
    assert Addresses("here:8001", "http://there:9").of("http") == "http://there:9"


def test_an_address_of_http_is_none_of_grpc() -> None:
    with pytest.raises(LoadTestError, match="'http://here:8000' is given for gRPC: give host:port"):
        Addresses("http://here:8000")
