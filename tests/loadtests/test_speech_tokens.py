"""Ids of speech tokens, asked of a server's own stages."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

from cosytriton_client import Client, EncodedVoice
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.speech_tokens import SpeechTokens
from cosytriton_loadtests.workload import DEFAULT_WORKLOAD, Ask
from cosytriton_loadtests.workload_file import read_workload

ASK = Ask("talk", "grpc-stream", "This is voice number five.", "known", options={"seed": 3})


def test_they_are_as_many_as_the_speech_is_made_of_and_the_seed_decides(server: Any) -> None:
    voice = read_workload(DEFAULT_WORKLOAD).voice(ASK)
    assert not isinstance(voice, str)
    with Client(server.grpc_url) as client, SpeechTokens(server.grpc_url) as tokens:
        encoded = client.encode(voice)
        ids = tokens.of(ASK, voice, encoded)
        assert len(ids) == client.synthesize(ASK.text, voice, seed=3).token_count
        assert tokens.of(ASK, voice, encoded) == ids
        other = Ask("talk", "grpc-stream", ASK.text, "known", options={"seed": 4})
        assert tokens.of(other, voice, encoded) != ids
        limited = Ask("talk", "grpc-stream", ASK.text, "known", options={"seed": 3, "max_tokens": 12})
        assert len(tokens.of(limited, voice, encoded)) == 12


def test_a_server_that_is_not_there_says_so() -> None:
    voice = read_workload(DEFAULT_WORKLOAD).voice(ASK)
    assert not isinstance(voice, str)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{free.getsockname()[1]}"
        with SpeechTokens(url) as tokens, pytest.raises(LoadTestError, match="cannot be asked"):
            tokens.of(ASK, voice, EncodedVoice(*[np.zeros((1, 1), np.int32)] * 5, np.array([[b""]], object)))  # type: ignore[call-arg, arg-type]
