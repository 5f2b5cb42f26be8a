"""Where the server listens: gRPC, HTTP and metrics stand on three ports of one host."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.workload import STREAMS

HTTP_PORT, METRICS_PORT = 8000, 8002
PATIENCE = 5.0  # seconds for the answer whether it is ready


@dataclass(frozen=True, slots=True)
class Addresses:
    """The server's addresses.

    Attributes:
        grpc: `host:port`.
        http: `http://host:port`; "": port 8000 of the same host.
    """

    grpc: str
    http: str = ""

    def __post_init__(self) -> None:
        if self.grpc.startswith("http:"):
            raise LoadTestError(
                f"{self.grpc!r} is given for gRPC: give host:port (usually port 8001) there, and "
                "http://host:port (usually port 8000) as the HTTP address."
            )

    def of(self, protocol: str) -> str:
        """The address for a protocol of the workload, as the client takes it."""
        if not protocol.startswith("http"):
            return self.grpc
        return self.http or f"http://{self.host}:{HTTP_PORT}"

    @property
    def host(self) -> str:
        """The host's name, in brackets if it is an IPv6 address."""
        name = urlsplit(self.grpc if "://" in self.grpc else f"grpc://{self.grpc}").hostname or "localhost"
        return f"[{name}]" if ":" in name else name


def check_ready(addresses: Addresses, protocols: Iterable[str]) -> None:
    """See that the server serves what the protocols need.

    Raises:
        LoadTestError: it does not, or nobody answers.
    """
    for protocol in protocols:
        url, model = addresses.of(protocol), "tts_stream" if protocol in STREAMS else "tts"
        try:
            ready = _http_ready(url, model) if protocol.startswith("http") else _grpc_ready(url, model)
        except (OSError, ValueError, grpc.RpcError) as error:
            reason = error.details() if isinstance(error, grpc.RpcError) else error
            raise LoadTestError(
                f"nobody answers at {url}, which the protocol {protocol!r} of the workload needs ({reason}): "
                "start the server, or give its address."
            ) from error
        if not ready:
            raise LoadTestError(f"the server at {url} does not serve {model!r} now: wait until it is ready.")


def _grpc_ready(url: str, model: str) -> bool:
    with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return bool(stub.ModelReady(service_pb2.ModelReadyRequest(name=model), timeout=PATIENCE).ready)


def _http_ready(url: str, model: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/models/{model}/ready", timeout=PATIENCE):
            return True
    except urllib.error.HTTPError:
        return False
