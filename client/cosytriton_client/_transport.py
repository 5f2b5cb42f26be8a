"""What the client needs of a protocol, and which protocol a URL means."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy.typing as npt

from cosytriton_client._errors import InvalidInputError

Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Timeout:
    """The longest that a call may wait, in seconds. There is no way to wait for ever."""

    connect: float = 5.0  # until the server answers at all
    request: float = 120.0  # until a unary answer is complete
    first_chunk: float = 60.0  # until the first chunk of a stream
    chunk: float = 30.0  # between two chunks

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value > 0 and math.isfinite(value)):
                raise InvalidInputError(
                    f"Timeout({field.name}={value!r}): a limit is a number of seconds above 0."
                )


@dataclass(frozen=True, slots=True)
class Request:
    """One inference: the model, its input tensors (each with a leading batch dim of 1), a unique id."""

    model: str
    inputs: Tensors
    request_id: str


class Transport(Protocol):
    """One protocol to one server. Raises `ClientError` only; may be used from several threads."""

    def infer(self, request: Request) -> Tensors:
        """The answer to a unary request: output name -> array [1, ...]."""
        ...

    def stream(
        self, request: Request, further: Iterable[Tensors] | None = None
    ) -> Generator[Tensors, None, None]:
        """The answers of a decoupled model as they come; closing the generator cancels the request.

        `further` inputs are sent behind the request while it is answered.
        """
        ...

    def close(self) -> None:
        """Give the connection back."""
        ...


def transport_for(url: str, timeout: Timeout, tls: Path | None = None) -> Transport:
    """The transport that the URL names: `grpc://host:port`, `http://host:port`, or `host:port` for gRPC.

    `tls`: the folder with `ca.crt`, and with `tls.crt` and `tls.key` of a client that must show itself.
    """
    scheme, host, port = _parsed(url)
    if scheme == "grpc":
        from cosytriton_client._grpc import GrpcTransport

        return GrpcTransport(host, port, timeout, tls)
    if tls is not None:
        raise InvalidInputError(f"TLS to {url!r}: Triton has it for gRPC alone; give 'grpc://host:port'.")
    from cosytriton_client._http import HttpTransport

    return HttpTransport(host, port, timeout)


def _parsed(url: str) -> tuple[str, str, int]:
    try:
        parts = urlsplit(url if "://" in url else f"grpc://{url}")
        if parts.scheme in ("grpc", "http") and parts.hostname and parts.port and not parts.path.strip("/"):
            return parts.scheme, parts.hostname, parts.port
    except ValueError:  # a port that is no number, an unfinished IPv6 address
        pass
    raise InvalidInputError(
        f"server address {url!r}: allowed are 'host:port' and 'grpc://host:port' (gRPC, usually port 8001) "
        "and 'http://host:port' (usually port 8000)."
    )
