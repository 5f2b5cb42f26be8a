"""Health by real inference: Triton itself stays "ready" when a Python model's process is dead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import CosytritonError, InputError, ServerError
from cosytriton_ensemble.families import family_named
from cosytriton_ensemble.pipeline import ANALYSIS_RATE, PIPELINES, Pipeline, pipeline_of
from cosytriton_ensemble.protocol import UNLIMITED, Stream, error_from_text, request_message, response_tensors
from cosytriton_ensemble.spec import Array, Ensemble, Feed, Stage

_WORDS = np.array([[b"one two three"]], np.object_)
_TOKENS = 32  # behind a voice of one second, a stream has a chunk before its last one


class NotReadyYet(ServerError):  # noqa: N818  (not a failure: ask again)
    """Nobody listens yet, or the models are still loading."""


class HealthCheck:
    """Asks a running server to work, over gRPC. `deadline` is in seconds, for each answer."""

    def __init__(self, url: str, deadline: float) -> None:
        self._url = url
        self._deadline = deadline
        self._answered: dict[str, int] = {}  # requests that each model had answered at the end of `alive`

    def server_version(self) -> str:
        """The version that the running server reports."""
        with self._errors(), grpc.insecure_channel(self._url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=self._deadline)
            return str(metadata.version)

    def ready(self) -> None:
        """Speak three words, unary and streamed; ServerError unless they come out as finite audio."""
        with self._errors():
            pipeline = self._pipeline()
            rate = np.array([[ANALYSIS_RATE]], np.int32)
            voice = self._infer(pipeline.voice_encoder, {names.AUDIO: _voice(), names.SAMPLE_RATE: rate})[0]
            request = voice | {
                names.TEXT: _WORDS,
                names.PROMPT_TEXT: _WORDS,
                names.MAX_TOKENS: np.array([[_TOKENS]], np.int32),
            }
            for model in (pipeline.tts, pipeline.tts_stream):
                for response in self._infer(model, request):
                    if not np.isfinite(response[names.WAVEFORM]).all():
                        raise ServerError(f"{model.name} speaks NaN; its graphs do not fit its checkpoint.")

    def alive(self) -> None:
        """Get an answer from every model, cheaply, and without waiting behind speech in the queues.

        Native stages run their smallest feed, unless they have answered others since the last time: a busy
        server shows by itself that it is alive. Python models must refuse a request that is complete but
        empty.
        """
        with self._errors():
            pipeline, answered = self._pipeline(), self._answers()
            for stage in pipeline.native_stages:
                before = self._answered.get(stage.name)
                if before is None or answered[stage.name] in (0, before):
                    self._infer(stage, stage.sample("min"))
            for stage in pipeline.python_stages:
                empty = {t.name: _empty(t.numpy_type, t.shape("min")) for t in stage.inputs}
                self._refused(stage, empty)
            self._answered = self._answers()

    def _answers(self) -> dict[str, int]:
        """How many requests each model has answered since the server's start."""
        with grpc.insecure_channel(self._url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            statistics = stub.ModelStatistics(service_pb2.ModelStatisticsRequest(), timeout=self._deadline)
            return {model.name: model.inference_count for model in statistics.model_stats}

    def _pipeline(self) -> Pipeline:
        """The declarations of the family that the server has."""
        request = service_pb2.ModelConfigRequest(name=next(iter(PIPELINES.values())).tts.name)
        with grpc.insecure_channel(self._url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            config = stub.ModelConfig(request, timeout=self._deadline).config
        return pipeline_of(family_named(config.parameters["family"].string_value))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ServerError:
            raise
        except CosytritonError as error:
            raise ServerError(f"The server at {self._url} is not well: {error}") from error
        except grpc.RpcError as error:
            loading = error.code() == grpc.StatusCode.UNAVAILABLE
            kind = NotReadyYet if loading else ServerError
            raise kind(f"The server at {self._url} is not well: {error.details()}.") from error

    def _refused(self, stage: Stage, feed: Feed) -> None:
        try:
            self._infer(stage, feed)
        except InputError:
            return
        raise ServerError(f"{stage.name} at {self._url} accepted an empty request; is it this kit's model?")

    def _infer(self, model: Stage | Ensemble, feed: Feed) -> list[Feed]:
        """Every response of one request, as arrays with batch dimension."""
        message = request_message(model.name, feed, "health")
        with grpc.insecure_channel(self._url, UNLIMITED) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                if isinstance(model, Stage) and model.decoupled:
                    return list(self._stream(stub, message))
                return [response_tensors(stub.ModelInfer(message, timeout=self._deadline))]
            except grpc.RpcError as error:
                raise error_from_text(error.details()) or error from None

    def _stream(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, message: Any) -> Iterator[Feed]:
        with contextlib.closing(Stream(stub, message, self._deadline)) as answers:
            for answer in answers:
                if text := answer.error_message:
                    raise error_from_text(text) or ServerError(f"The server at {self._url}: {text}")
                if answer.infer_response.outputs:
                    yield response_tensors(answer.infer_response)


def _empty(numpy_type: type, shape: tuple[int, ...]) -> Array:
    return np.full((1, *shape), b"" if numpy_type is np.object_ else 0, numpy_type)


def _voice() -> Array:
    """One second of a buzz with some noise, [1, samples]: enough for the voice stages to work on."""
    time = np.arange(ANALYSIS_RATE) / ANALYSIS_RATE
    harmonics = sum(np.sin(2 * np.pi * 120 * h * time) / h for h in range(1, 9))
    noise = np.random.default_rng(0).normal(0, 0.02, time.size)
    voice: Array = (0.1 * harmonics + noise).astype(np.float32)[None]
    return voice
