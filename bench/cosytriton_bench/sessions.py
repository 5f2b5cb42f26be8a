"""The graphs of a repository, opened as the server opens them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import onnxruntime as ort
from google.protobuf.json_format import MessageToDict
from google.protobuf.text_format import Parse
from tritonclient.grpc.model_config_pb2 import ModelConfig

from cosytriton_bench.measure import Stopwatch, timed
from cosytriton_ensemble.config import config_text
from cosytriton_ensemble.language_model import LanguageModel, OnnxModel
from cosytriton_ensemble.llm_spec import Prompt, TokenIds
from cosytriton_ensemble.onnx_session import configured_options, open_session
from cosytriton_ensemble.profiles import PROFILES
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.sampling import FloatArray, seeded_uniform
from cosytriton_ensemble.spec import Array, Feed, Stage


def options_of(stage: Stage, profile: str, threads: int) -> tuple[ort.SessionOptions, ort.RunOptions]:
    """ONNX Runtime's options of a native stage, as the server reads them from its configuration."""
    config = Parse(config_text(stage, PROFILES[profile]), ModelConfig())
    options, run_options = configured_options(MessageToDict(config, preserving_proto_field_name=True))
    options.intra_op_num_threads = threads
    return options, run_options


def graph_of(repository: Path, stage: Stage, profile: str) -> Path:
    """The file that a profile serves of a stage."""
    return version_directory(repository, stage.name) / PROFILES[profile].artifact_of(stage)


class NativeStage:
    """A session of a native stage."""

    def __init__(self, session: ort.InferenceSession, options: ort.RunOptions | None = None) -> None:
        self._session, self._options = session, options
        self._outputs = [output.name for output in session.get_outputs()]

    @classmethod
    def open(cls, repository: Path, stage: Stage, profile: str, threads: int) -> Self:
        """Open the graph of a profile."""
        options, run_options = options_of(stage, profile, threads)
        return cls(open_session(graph_of(repository, stage, profile), options), run_options)

    def outputs(self, feed: Feed) -> list[Array]:
        """Run it."""
        given = {value.name: feed[value.name] for value in self._session.get_inputs()}
        answer: list[Array] = self._session.run(self._outputs, given, self._options)
        return answer

    def time(self, feed: Feed) -> Stopwatch:
        """Time one run."""
        with timed() as watch:
            self.outputs(feed)
        return watch


class Decoding:
    """The language model of a profile."""

    def __init__(self, model: LanguageModel) -> None:
        self._model, self.spec = model, model.spec

    @classmethod
    def open(cls, path: Path, rows: int, threads: int) -> Self:
        """Open a graph as the server does."""
        return cls(LanguageModel.open(path, threads=threads, rows=rows))

    @classmethod
    def of(cls, session: ort.InferenceSession, rows: int) -> Self:
        """Take a session that was opened with other options."""
        return cls(LanguageModel(OnnxModel(session, rows), rows))

    def prompt(self, positions: int, prompt_tokens: int) -> TokenIds:
        """A prompt of random ids [positions], laid out as a request's."""
        rng = np.random.default_rng(0)
        text = rng.integers(0, self.spec.text_rows, positions - prompt_tokens - 2).tolist()
        speech = rng.integers(0, self.spec.speech_codes, prompt_tokens).tolist()
        return self.spec.prompt(text, speech).ids

    def logits(self, prompt: TokenIds, fed: Sequence[int]) -> FloatArray:
        """Logits [1 + fed, speech rows] behind a prompt, and behind each id that is fed after it."""
        rows = [self._model.join(Prompt(prompt)).copy()]
        rows += [self._model.step([one])[0].copy() for one in fed]
        self._model.leave(0)
        return np.stack(rows)

    def prefill(self, prompt: TokenIds) -> Stopwatch:
        """Time a prompt."""
        with timed() as watch:
            self._model.join(Prompt(prompt))
        self._model.leave(0)
        return watch

    def decode(self, rows: int, prompt: TokenIds, steps: int) -> Stopwatch:
        """Time a step that feeds one id to each row: the mean over `steps` behind the prompt."""
        for _ in range(rows):
            self._model.join(Prompt(prompt))
        with timed() as watch:
            for _ in range(steps):
                self._model.step([self.spec.speech_offset] * rows)
        for row in reversed(range(rows)):
            self._model.leave(row)
        return Stopwatch(watch.seconds / steps, watch.cpu / steps)

    def speak(self, prompt: TokenIds, tokens: int) -> Stopwatch:
        """Time a request: the prompt, and `tokens` that are drawn as the server draws them."""
        sampler, uniform, said = self.spec.sampler, seeded_uniform(0), list[int]()
        with timed() as watch:
            said.append(sampler.sample(self._model.join(Prompt(prompt)), said, uniform))
            while len(said) < tokens:
                logits = self._model.step([self.spec.speech_offset + said[-1]])[0]
                said.append(sampler.sample(logits, said, uniform))
        self._model.leave(0)
        return watch
