"""The ids of the speech tokens that a server's language model makes of a request, asked of its own stages."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, cast

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cosytriton_client import EncodedVoice, Voice
from cosytriton_ensemble import names
from cosytriton_ensemble.errors import CosytritonError, GenerationError, InputError
from cosytriton_ensemble.families import Family, family_named
from cosytriton_ensemble.models.loopback import Loopback
from cosytriton_ensemble.models.sources import Requests, WrittenText
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.protocol import UNLIMITED, Stream, request_message, response_tensors
from cosytriton_ensemble.spec import Array, Feed, Stage
from cosytriton_ensemble.utterance import read_utterance, text_of
from cosytriton_ensemble.voice import Voice as EnrolledVoice
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.workload import Ask

SECONDS = 60.0  # for one piece of text
_NO_TOKENS = np.zeros(0, np.int32)
# What decides the tokens, with the tensor that it travels in.
_OPTIONS: dict[str, tuple[str, type]] = {
    "mode": (names.MODE, object),
    "instruction": (names.INSTRUCT_TEXT, object),
    "seed": (names.SEED, np.int64),
    "max_tokens": (names.MAX_TOKENS, np.int32),
}


class SpeechTokens:
    """A connection to `text_frontend` and `speech_lm`; a context manager.

    Args:
        url: `host:port` of gRPC.
    """

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url.removeprefix("grpc://"), UNLIMITED)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def of(self, ask: Ask, voice: Voice, encoded: EncodedVoice) -> tuple[int, ...]:
        """The ids of the first piece of the text; those of silence that is not spoken are left out.

        Raises:
            LoadTestError: the server does not let its stages be asked.
        """
        feed: Feed = {name: array[0] for name, array in encoded.tensors().items()}
        feed |= {
            name: _bytes(text)
            for name, text in ((names.TEXT, ask.text), (names.PROMPT_TEXT, voice.transcript))
        }
        feed |= {
            name: _bytes(ask.options[option]) if kind is object else np.array([ask.options[option]], kind)
            for option, (name, kind) in _OPTIONS.items()
            if option in ask.options
        }
        try:
            family = self._family()
            utterance = read_utterance(feed, family, _NoVoices(), text_of(feed, names.CHECKPOINT))
            # It asks `models` for one call, as a model does of its own server.
            pieces = WrittenText(ask.text, Requests(utterance, family), cast(Loopback, self))
            return tuple(self._spoken(pipeline_of(family).speech_lm, next(iter(pieces))))
        except (grpc.RpcError, CosytritonError) as error:
            raise LoadTestError(f"the stages of the server cannot be asked: {error}") from error

    def call(self, stage: Stage, feed: Feed) -> Feed:
        """The one response of a plain model, without batch dimension."""
        response = self._stub.ModelInfer(_message(stage, feed), timeout=SECONDS)
        return {name: array[0] for name, array in response_tensors(response).items()}

    def _family(self) -> Family:
        request = service_pb2.ModelConfigRequest(name="text_frontend")
        config = self._stub.ModelConfig(request, timeout=SECONDS).config
        return family_named(config.parameters["family"].string_value)

    def _spoken(self, stage: Stage, feed: Feed) -> Iterator[int]:
        for answer in Stream(self._stub, _message(stage, feed), SECONDS):
            if answer.error_message:
                raise GenerationError(answer.error_message)
            tensors = response_tensors(answer.infer_response)
            yield from tensors.get(names.TOKENS, _NO_TOKENS).ravel().tolist()


class _NoVoices:
    """A request of a load test brings its voice."""

    def get(self, name: str) -> EnrolledVoice:
        raise InputError(f"{name} is the name of a voice; its tokens are the server's own.")


def _bytes(text: str) -> Array:
    return np.array([text.encode()], np.object_)


def _message(stage: Stage, feed: Feed) -> Any:
    inputs = {tensor.name: feed[tensor.name][None] for tensor in stage.inputs if tensor.name in feed}
    return request_message(stage.name, inputs, uuid.uuid4().hex)
