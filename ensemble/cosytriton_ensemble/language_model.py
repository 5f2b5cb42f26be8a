"""The exported language model on ONNX Runtime, with a key-value cache that rows join and leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.generation import SPEAKER_WIDTH, SpeechRequest
from cosytriton_ensemble.kv_cache import KeyValueCache
from cosytriton_ensemble.llm_spec import EMBEDDED, METADATA_KEY, LanguageModelSpec, Prompt, TokenIds
from cosytriton_ensemble.sampling import FloatArray

TEXT_ENCODER_FILE = "text_encoder.onnx"


class TextEncoder:
    """CosyVoice 1's text encoder: embeds the text and the speaker for the language model."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session

    def __call__(self, request: SpeechRequest) -> FloatArray:
        """Embed [speaker] text: [1 + n, width], or [n, width] where the request has no speaker."""
        speaker = np.zeros(SPEAKER_WIDTH, np.float32) if request.speaker is None else request.speaker
        feed = {"text_ids": np.array([request.text], np.int32), "speaker_embedding": speaker[None]}
        text, voice = self._session.run(["text_embeddings", "speaker"], feed)
        return np.concatenate([voice[0], text[0]]) if request.has_speaker else np.asarray(text[0])


class LanguageModel:
    """One session and the rows that it is decoding; a row is a request's sequence.

    Rows 0..n-1 are in use. They are bound to the session by pointer and updated in place. Not thread-safe.

    Args:
        session: A session on the CPU with an exported language model.
        rows: How many rows can be decoded at once.
        max_positions: The longest sequence of a row, prompt and speech together.
        text_encoder: Embeds the text, where the model needs one.

    Raises:
        RepositoryError: The graph is not an exported language model, or it needs a text encoder.

    """

    def __init__(
        self,
        session: ort.InferenceSession,
        rows: int = 8,
        max_positions: int = 4096,
        text_encoder: TextEncoder | None = None,
    ) -> None:
        self.spec = _spec_of(session)
        if self.spec.text_encoder and text_encoder is None:
            raise RepositoryError(
                f"The language model has its text embedded by another graph, {TEXT_ENCODER_FILE}, but none "
                "was given. Export the model again."
            )
        self.rows, self.max_positions = rows, max_positions
        self._session, self._text_encoder = session, text_encoder
        self.cache = KeyValueCache(self.spec, rows)
        self._counts: list[int] = []  # positions in the cache, one for each row in use
        self._ids = np.zeros((rows, 1), np.int32)
        self._past = np.zeros(rows, np.int32)
        self._new = np.ones(rows, np.int32)
        self._logits = np.zeros((rows, self.spec.speech_rows), np.float32)
        widths = [value.shape[2] for value in session.get_inputs() if value.name == "embeddings"]
        # A fed-back token needs no embedding, but the graph's input must be bound.
        self._embeddings = np.zeros((rows, 1, widths[0]), np.float32) if widths else None
        self._bindings: dict[int, ort.IOBinding] = {}  # of a step, by its number of rows

    @classmethod
    def open(cls, path: Path, *, threads: int = 0, rows: int = 8, max_positions: int = 4096) -> Self:
        """Load a graph, and its text encoder where it has one, on the CPU; `threads` = 0 takes every core."""
        session, encoder = _session(path, threads), path.with_name(TEXT_ENCODER_FILE)
        text_encoder = TextEncoder(_session(encoder, threads)) if encoder.exists() else None
        return cls(session, rows, max_positions, text_encoder)

    def prompt_of(self, request: SpeechRequest) -> Prompt:
        """Lay out what a request starts from; runs the text encoder where the model has one."""
        if not self.spec.text_encoder or self._text_encoder is None:
            return self.spec.prompt(request.text, request.prompt_speech)
        embedded = self._text_encoder(request)
        ids = self.spec.prompt([EMBEDDED] * len(embedded), request.prompt_speech).ids
        embeddings = np.zeros((len(ids), embedded.shape[1]), np.float32)
        embeddings[ids == EMBEDDED] = embedded
        return Prompt(ids, embeddings)

    def join(self, prompt: Prompt) -> FloatArray:
        """Take the next free row for a prompt [n]; logits [speech_rows] of what follows.

        If it raises, no row was taken.
        """
        row = len(self._counts)
        self._fit([*self._counts, len(prompt)])
        self.cache.clear(row)
        logits = self._run(row, 0, prompt)
        self._counts.append(len(prompt))
        return logits

    def extend(self, row: int, ids: TokenIds) -> FloatArray:
        """Feed several unified ids [n] to one row; logits [speech_rows] of what follows.

        If it raises, the row is as it was.
        """
        past = self._counts[row]
        self._fit([*self._counts, past + len(ids)])
        logits = self._run(row, past, Prompt(ids))
        self._counts[row] = past + len(ids)
        return logits

    def step(self, ids: Sequence[int], waiting: Collection[int] = ()) -> FloatArray:
        """Feed one unified id to every row in use; logits [rows in use, speech_rows].

        Rows in `waiting` are not fed: they take part because the others' rows must be contiguous. Their id
        is overwritten by what is fed to them next, and their logits mean nothing. The result is valid until
        the next call and may be overwritten.
        """
        rows = len(self._counts)
        self._fit([count + 1 for count in self._counts])
        used = slice(0, rows)
        if rows not in self._bindings:
            self._bindings[rows] = self._bind(
                self._ids[used], self._past[used], self._new[used], used, self._embeddings
            )
        self._ids[used, 0], self._past[used] = ids, self._counts
        self._session.run_with_iobinding(self._bindings[rows])
        self._counts = [count + (row not in waiting) for row, count in enumerate(self._counts)]
        return self._logits[used]

    def leave(self, row: int) -> None:
        """Free a row; the last row in use takes its place."""
        count = self._counts.pop()
        if row < len(self._counts):
            self.cache.move(len(self._counts), row, count)
            self._counts[row] = count

    def _fit(self, counts: Sequence[int]) -> None:
        if self.cache.fit(max(counts), len(self._counts)):
            self._bindings.clear()  # they hold pointers into the former buffers

    def _run(self, row: int, past_count: int, new: Prompt) -> FloatArray:
        """Feed new positions to one row behind its `past_count` first."""
        past, count = np.array([past_count], np.int32), np.array([len(new)], np.int32)
        embeddings = None
        if self._embeddings is not None:
            given = new.embeddings
            shape = (len(new), self._embeddings.shape[2])
            embeddings = (np.zeros(shape, np.float32) if given is None else given)[None]
        binding = self._bind(new.ids[None], past, count, slice(row, row + 1), embeddings)
        self._session.run_with_iobinding(binding)
        logits: FloatArray = self._logits[row]
        return logits

    def _bind(
        self, ids: TokenIds, past: TokenIds, new: TokenIds, rows: slice, embeddings: FloatArray | None
    ) -> ort.IOBinding:
        """Bind inputs and outputs by pointer; the caller keeps the arrays alive."""
        binding = self._session.io_binding()
        inputs: dict[str, npt.NDArray[Any]] = {"input_ids": ids, "past_counts": past, "new_counts": new}
        if embeddings is not None:
            inputs["embeddings"] = embeddings[: len(ids)]
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        logits = self._logits[rows]
        binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        for name, buffer in self.cache.buffers.items():
            place = ("cpu", 0, buffer.dtype, buffer[rows].shape, buffer[rows].ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("_cache.", "_cache_out."), *place)
        return binding


def _session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_mem_pattern = False  # shapes change from call to call
    # The other stages compute between the steps: idle threads must not spin on their cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _spec_of(session: ort.InferenceSession) -> LanguageModelSpec:
    metadata = session.get_modelmeta().custom_metadata_map
    if METADATA_KEY not in metadata:
        raise RepositoryError(
            f"The graph has no metadata {METADATA_KEY!r}: it is not a language model that "
            "`cosytriton export` made. Export it again."
        )
    return LanguageModelSpec.from_json(metadata[METADATA_KEY])
