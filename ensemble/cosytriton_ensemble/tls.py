"""TLS of gRPC: a folder with the files of a Kubernetes TLS Secret, for the server and for its callers."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cosytriton_ensemble.errors import ServerError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
_FLIGHTS = 4  # turns of each side until a handshake is over, the check of the client's certificate included


@dataclass(frozen=True, slots=True)
class Tls:
    """What the server shows and wants.

    Attributes:
        folder: holds `tls.crt` and `tls.key`; `ca.crt` where the system does not know who signed it.
        mutual: whether clients must show a certificate that `ca.crt` signed. The server's own calls show
            its own one.

    """

    folder: Path
    mutual: bool = False

    def flags(self) -> list[str]:
        """Those of tritonserver."""
        mode = "--grpc-use-ssl-mutual=true" if self.mutual else "--grpc-use-ssl=true"
        files = {"server-cert": CERTIFICATE, "server-key": KEY} | (
            {"root-cert": AUTHORITY} if self.mutual else {}
        )
        return [mode, *(f"--grpc-{flag}={self.folder / name}" for flag, name in files.items())]

    def check(self, host: str) -> None:
        """Let the server and a caller of `host` shake hands in memory.

        Raises:
            ServerError: A file is missing, the key is another one's, the certificate is not valid for `host`,
                or not for this use.

        """
        try:
            self._shake_hands(host)
        except (OSError, ssl.SSLError) as error:  # an SSLError is an OSError; named for the reader
            use = "server and client authentication" if self.mutual else "server authentication"
            raise ServerError(
                f"The TLS files in {self.folder} cannot be used: {error}. Needed are {CERTIFICATE}, {KEY} "
                f"and, unless the system trusts its signer, {AUTHORITY}; the certificate must be valid for "
                f"{use} and for {host}, under which the server's own models and probes call it."
            ) from error

    def _shake_hands(self, host: str) -> None:
        authority = self.folder / AUTHORITY
        trusted = authority if self.mutual or authority.exists() else None
        one_way, other_way = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=trusted)
        server.verify_mode = ssl.CERT_REQUIRED if self.mutual else ssl.CERT_NONE
        client = ssl.create_default_context(cafile=trusted)
        for side in (server, client):
            side.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
        sides = (
            client.wrap_bio(one_way, other_way, server_hostname=host),
            server.wrap_bio(other_way, one_way, server_side=True),
        )
        for _ in range(_FLIGHTS):
            for each in sides:
                with contextlib.suppress(ssl.SSLWantReadError):
                    each.do_handshake()


def open_channel(url: str, folder: Path | None, options: Sequence[tuple[str, Any]] = ()) -> Any:
    """A gRPC channel to `url`; with TLS where there is a folder of a caller's files.

    Its `ca.crt`, or else the system's list, says whom to trust; `tls.crt` and `tls.key` are shown to a server
    that asks for them. The parts of a server reach each other directly, whatever proxy is for the internet.
    """
    options = (*options, ("grpc.enable_http_proxy", 0))
    if folder is None:
        return grpc.insecure_channel(url, options)
    files = (folder / name for name in (AUTHORITY, KEY, CERTIFICATE))
    contents = (file.read_bytes() if file.exists() else None for file in files)
    return grpc.secure_channel(url, grpc.ssl_channel_credentials(*contents), options)
