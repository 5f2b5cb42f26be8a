"""Health by real inference: Triton itself stays "ready" when a Python model's process is dead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
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
from cosytriton_ensemble.tls import open_channel

_WORDS = np.array([[b"one two three"]], np.object_)
_GRACE = 1.0  # seconds that a call gets at least, also behind another that has used the time up
_TOKENS = 32  # behind a voice of one second, a stream has a chunk before its last one


class NotReadyYet(ServerError):  # noqa: N818  (not a failure: ask again)
    """Nobody listens yet, or the models are still loading."""


class HealthCheck:
    """Asks a running server to work, over gRPC; of its models, those that it has loaded.

    Args:
        url: `host:port` of the server.
        deadline: Seconds for all answers of one call; a late one leaves a second to each that follows.
        tls: The folder of `tls.open_channel`, None for a server without TLS.

    """

    def __init__(self, url: str, deadline: float, tls: Path | None = None) -> None:
        self._url, self._tls = url, tls
        self._deadline, self._end = deadline, 0.0
        self._answered: dict[str, int] = {}  # requests that each model had answered at the end of `alive`

    def server_version(self) -> str:
        """The version that the running server reports."""
        with self._asking():
            return str(
                self._stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=self._left()).version
            )

    def ready(self) -> None:
        """Speak three words, unary and streamed; ServerError unless they come out as finite audio.

        A language model that is alone in its server only has to be `alive`.
        """
        with self._asking():
            pipeline, answered = self._pipeline()
            if pipeline.tts.name not in answered:
                self._refused(pipeline.speech_lm)
                return
            rate = np.array([[ANALYSIS_RATE]], np.int32)
            recording = {names.AUDIO: _voice(), names.SAMPLE_RATE: rate}
            request = self._infer(pipeline.voice_encoder, recording)[0] | {
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
        with self._asking():
            pipeline, answered = self._pipeline()
            # Python models answer at once even under load, and so are asked before the time is used up.
            for stage in pipeline.python_stages:
                if stage.name in answered:
                    self._refused(stage)
            for stage in pipeline.native_stages:
                before = self._answered.get(stage.name)
                if stage.name in answered and (before is None or answered[stage.name] in (0, before)):
                    self._works(stage, answered[stage.name])
            self._answered = self._answers()

    def _works(self, stage: Stage, before: int) -> None:
        """Run the smallest feed of a native stage; where it is late, answers to others count as well."""
        try:
            self._infer(stage, stage.sample("min"))
        except grpc.RpcError as error:
            late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if not (late and self._answers()[stage.name] > before):
                raise

    def _answers(self) -> dict[str, int]:
        """How many requests each model that is loaded has answered since the server's start."""
        statistics = self._stub.ModelStatistics(service_pb2.ModelStatisticsRequest(), timeout=self._left())
        return {model.name: model.inference_count for model in statistics.model_stats}

    def _pipeline(self) -> tuple[Pipeline, dict[str, int]]:
        """The declarations of the family that the server has, and `_answers`."""
        answered = self._answers()
        known = next(iter(PIPELINES.values()))
        name = known.tts.name if known.tts.name in answered else known.speech_lm.name
        config = self._stub.ModelConfig(
            service_pb2.ModelConfigRequest(name=name), timeout=self._left()
        ).config
        return pipeline_of(family_named(config.parameters["family"].string_value)), answered

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """A channel of its own, so that nothing is kept of a server that was; errors are translated."""
        self._end = time.monotonic() + self._deadline
        try:
            with open_channel(self._url, self._tls, UNLIMITED) as channel:
                self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                yield
        except ServerError:
            raise
        except CosytritonError as error:
            raise ServerError(f"The server at {self._url} is not well: {error}") from error
        except grpc.RpcError as error:
            loading = error.code() == grpc.StatusCode.UNAVAILABLE
            kind = NotReadyYet if loading else ServerError
            raise kind(f"The server at {self._url} is not well: {error.details()}.") from error

    def _left(self) -> float:
        """Seconds until the deadline."""
        return max(self._end - time.monotonic(), _GRACE)

    def _refused(self, stage: Stage) -> None:
        """Send a Python model a request that is complete but empty, which it must refuse."""
        empty = {t.name: _empty(t.numpy_type, t.shape("min")) for t in stage.inputs}
        try:
            self._infer(stage, empty)
        except InputError:
            return
        raise ServerError(f"{stage.name} at {self._url} accepted an empty request; is it this kit's model?")

    def _infer(self, model: Stage | Ensemble, feed: Feed) -> list[Feed]:
        """Every response of one request, as arrays with batch dimension."""
        message = request_message(model.name, feed, names.PROBE)
        try:
            if isinstance(model, Stage) and model.decoupled:
                return list(self._stream(message))
            return [response_tensors(self._stub.ModelInfer(message, timeout=self._left()))]
        except grpc.RpcError as error:
            raise error_from_text(error.details()) or error from None

    def _stream(self, message: Any) -> Iterator[Feed]:
        with contextlib.closing(Stream(self._stub, message, self._left())) as answers:
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
