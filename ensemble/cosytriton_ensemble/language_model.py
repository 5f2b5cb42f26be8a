"""The language model's graph on ONNX Runtime, with a key-value cache that rows join and leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from cosytriton_ensemble import huge_pages
from cosytriton_ensemble.errors import RepositoryError, ServerError
from cosytriton_ensemble.generation import SPEAKER_WIDTH, SpeechRequest
from cosytriton_ensemble.kv_cache import DEFAULT_MEMORY, CacheMemory, KeyValueCache
from cosytriton_ensemble.llm_spec import EMBEDDED, METADATA_KEY, LanguageModelSpec, Prompt, TokenIds
from cosytriton_ensemble.onnx_session import open_session, session_options
from cosytriton_ensemble.prefix_cache import PrefixCache
from cosytriton_ensemble.profiles import Device, text_encoder_of
from cosytriton_ensemble.sampling import FloatArray

OPENERS = "cosytriton.language_models"
"""Group of entry points that open what is no graph; their names are file suffixes without the dot."""


def open_decoder(
    path: Path,
    *,
    device: Device,
    threads: int,
    rows: int,
    max_positions: int,
    memory: CacheMemory = DEFAULT_MEMORY,
) -> LanguageModel:
    """Load the language model at `path`: a graph, or what another package opens, such as a plan.

    Raises:
        RepositoryError: It is no language model.
        ServerError: Nothing opens such a file, or the device cannot be used.

    """
    if path.suffix == ".onnx":
        return LanguageModel.open(
            path, device=device, threads=threads, rows=rows, max_positions=max_positions, memory=memory
        )
    for opener in entry_points(group=OPENERS, name=path.suffix[1:]):
        decoder: LanguageModel = opener.load()(path, rows=rows, max_positions=max_positions)
        return decoder
    raise ServerError(
        f"Nothing here opens the language model {path}: no installed package has an entry point "
        f"{path.suffix[1:]!r} in the group {OPENERS!r}. Install what built the file, or serve a "
        "profile of ONNX Runtime."
    )


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


class CachedModel(Protocol):
    """A language model and the key-value caches of its rows, wherever they lie.

    `width` is that of an embedding, None where the model takes ids alone.
    """

    spec: LanguageModelSpec
    width: int | None

    def fit(self, positions: int, rows: int) -> None:
        """Make room for `positions` in each row, and keep the first `rows`."""

    def clear(self, row: int) -> None:
        """Zero a row."""

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` of a row over another row."""

    def nbytes(self, rows: int) -> int:
        """Bytes of the caches while so many rows are in use."""

    def run(
        self, rows: slice, ids: TokenIds, past: TokenIds, new: TokenIds, embeddings: FloatArray | None = None
    ) -> FloatArray:
        """Feed `ids` [rows, new] behind the `past` [rows] positions of neighbouring rows; logits of each.

        `new` [rows] says how many ids count. `embeddings` [rows, new, width] stand for ids that are
        `EMBEDDED`. The result [rows, speech_rows] is valid until the next call.
        """


class LanguageModel:
    """A model and the rows that it is decoding; a row is a request's sequence.

    Rows 0..n-1 are in use. Not thread-safe.

    Args:
        model: The model and its caches.
        rows: How many rows can be decoded at once.
        max_positions: The longest sequence of a row, prompt and speech together.
        text_encoder: Embeds the text, where the model needs one.
        prefixes: Keeps what prompts share, over the model's own caches.
        most_positions: Of all rows' caches together; None where their memory was taken at the start.

    Raises:
        RepositoryError: The model needs a text encoder.

    """

    def __init__(
        self,
        model: CachedModel,
        rows: int = 8,
        max_positions: int = 4096,
        text_encoder: TextEncoder | None = None,
        prefixes: PrefixCache | None = None,
        most_positions: int | None = None,
    ) -> None:
        self.spec = model.spec
        if self.spec.text_encoder and text_encoder is None:
            raise RepositoryError(
                "The language model has its text embedded by another graph, its text encoder, but there is "
                "none beside it. Export the model again."
            )
        self.model, self.rows, self.max_positions = model, rows, max_positions
        self._text_encoder, self._prefixes, self._most_positions = text_encoder, prefixes, most_positions
        self._counts: list[int] = []  # positions in the cache, one for each row in use

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        device: Device = "cpu",
        threads: int = 0,
        rows: int = 8,
        max_positions: int = 4096,
        memory: CacheMemory = DEFAULT_MEMORY,
    ) -> Self:
        """Load a graph, and its text encoder where it has one; `threads` = 0 takes every core."""
        session, encoder = _session(path, device, threads), path.with_name(text_encoder_of(path.name))
        text_encoder = TextEncoder(_session(encoder, device, threads)) if encoder.exists() else None
        if device == "cpu":
            huge_pages.settle()
        model = OnnxModel(session, rows)
        prefixes = PrefixCache(model.cache, memory.prefixes)
        most_positions = memory.rows // model.cache.position_bytes
        return cls(model, rows, max_positions, text_encoder, prefixes, most_positions)

    def prompt_of(self, request: SpeechRequest) -> Prompt:
        """Lay out what a request starts from; runs the text encoder where the model has one."""
        if not self.spec.text_encoder or self._text_encoder is None:
            return self.spec.prompt(request.text, request.prompt_speech, request.prompt_text_count)
        embedded = self._text_encoder(request)
        ids = self.spec.prompt([EMBEDDED] * len(embedded), request.prompt_speech).ids
        embeddings = np.zeros((len(ids), embedded.shape[1]), np.float32)
        embeddings[ids == EMBEDDED] = embedded
        return Prompt(ids, embeddings)

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether rows of so many positions fit together: each takes the room of the longest."""
        return self._most_positions is None or len(lengths) * max(lengths) <= self._most_positions

    def join(self, prompt: Prompt) -> FloatArray:
        """Take the next free row for a prompt [n] or its first chunk; logits [speech_rows] of what follows.

        If it raises, no row was taken.
        """
        row = len(self._counts)
        self._fit([*self._counts, len(prompt)])
        self.model.clear(row)
        logits = self._feed(row, 0, prompt)
        self._counts.append(len(prompt))
        return logits

    def extend(self, row: int, new: Prompt) -> FloatArray:
        """Feed several positions [n] to one row; logits [speech_rows] of what follows.

        If it raises, the row is as it was.
        """
        past = self._counts[row]
        self._fit([*self._counts, past + len(new)])
        logits = self._feed(row, past, new)
        self._counts[row] = past + len(new)
        return logits

    def step(self, ids: Sequence[int], waiting: Collection[int] = ()) -> FloatArray:
        """Feed one unified id to every row in use; logits [rows in use, speech_rows].

        Rows in `waiting` are not fed: they take part because the others' rows must be contiguous. Their id
        is overwritten by what is fed to them next, and their logits mean nothing. The result is valid until
        the next call and may be overwritten.
        """
        self._fit([count + 1 for count in self._counts])
        fed = np.array(ids, np.int32)[:, None]
        past, new = np.array(self._counts, np.int32), np.ones(len(fed), np.int32)
        logits = self.model.run(slice(0, len(fed)), fed, past, new)
        self._counts = [count + (row not in waiting) for row, count in enumerate(self._counts)]
        return logits

    def leave(self, row: int) -> None:
        """Free a row; the last row in use takes its place."""
        count = self._counts.pop()
        if row < len(self._counts):
            self.model.move(len(self._counts), row, count)
            self._counts[row] = count

    def memory(self) -> CacheMemory:
        """Tell what keys and values take now; safe from any thread."""
        prefixes = self._prefixes.nbytes if self._prefixes else 0
        return CacheMemory(self.model.nbytes(len(self._counts)), prefixes)

    def _fit(self, counts: Sequence[int]) -> None:
        self.model.fit(max(counts), len(self._counts))

    def _feed(self, row: int, past_count: int, new: Prompt) -> FloatArray:
        """Run new positions of one row, or take what is kept of them."""
        if not new.key or self._prefixes is None:
            return self._run(row, past_count, new)
        logits = self._prefixes.restore(new.key, row, past_count)
        if logits is None:
            logits = self._run(row, past_count, new)
            self._prefixes.keep(new.key, row, past_count, past_count + len(new), logits)
        return logits

    def _run(self, row: int, past_count: int, new: Prompt) -> FloatArray:
        """Feed new positions to one row behind its `past_count` first."""
        past, count = np.array([past_count], np.int32), np.array([len(new)], np.int32)
        embeddings = None if new.embeddings is None else new.embeddings[None]
        logits: FloatArray = self.model.run(slice(row, row + 1), new.ids[None], past, count, embeddings)[0]
        return logits


class OnnxModel:
    """A session whose caches lie in the CPU's memory; see `CachedModel`.

    They are bound to the session by pointer and updated in place; on a GPU they are copied there and back in
    each step.

    Args:
        session: A session with an exported language model.
        rows: How many rows can be decoded at once.

    Raises:
        RepositoryError: The graph is not an exported language model.

    """

    def __init__(self, session: ort.InferenceSession, rows: int) -> None:
        self.spec, self._session = _spec_of(session), session
        self.cache = KeyValueCache(self.spec, rows)
        self.clear, self.move = self.cache.clear, self.cache.move
        self._ids = np.zeros((rows, 1), np.int32)
        self._past = np.zeros(rows, np.int32)
        self._new = np.ones(rows, np.int32)
        self._logits = np.zeros((rows, self.spec.speech_rows), np.float32)
        widths = [value.shape[2] for value in session.get_inputs() if value.name == "embeddings"]
        self.width: int | None = widths[0] if widths else None
        # A fed-back token needs no embedding, but the graph's input must be bound.
        self._unheard = np.zeros((rows, 1, self.width or 0), np.float32)
        self._steps: dict[int, ort.IOBinding] = {}  # of one id for each row, by the number of rows

    def fit(self, positions: int, rows: int) -> None:
        """See `CachedModel`."""
        if self.cache.fit(positions, rows):
            self._steps.clear()  # they hold pointers into the former buffers

    def nbytes(self, rows: int) -> int:
        """See `CachedModel`."""
        return rows * self.cache.capacity * self.cache.position_bytes

    def run(
        self, rows: slice, ids: TokenIds, past: TokenIds, new: TokenIds, embeddings: FloatArray | None = None
    ) -> FloatArray:
        """See `CachedModel`."""
        if ids.shape[1] == 1 and rows.start == 0 and embeddings is None:
            self._ids[rows], self._past[rows] = ids, past
            if rows.stop not in self._steps:
                fed = self._ids[rows], self._past[rows], self._new[rows]
                self._steps[rows.stop] = self._bind(rows, *fed, self._unheard[rows])
            binding = self._steps[rows.stop]
        else:
            if embeddings is None:
                embeddings = np.zeros((*ids.shape, self.width or 0), np.float32)
            binding = self._bind(rows, ids, past, new, embeddings)
        self._session.run_with_iobinding(binding)
        return self._logits[rows]

    def _bind(
        self, rows: slice, ids: TokenIds, past: TokenIds, new: TokenIds, embeddings: FloatArray
    ) -> ort.IOBinding:
        """Bind inputs and outputs by pointer; the caller keeps the arrays alive."""
        binding = self._session.io_binding()
        inputs: dict[str, npt.NDArray[Any]] = {"input_ids": ids, "past_counts": past, "new_counts": new}
        if self.width is not None:
            inputs["embeddings"] = embeddings
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        logits = self._logits[rows]
        binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        for name, buffer in self.cache.buffers.items():
            place = ("cpu", 0, buffer.dtype, buffer[rows].shape, buffer[rows].ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("_cache.", "_cache_out."), *place)
        return binding


def _session(path: Path, device: Device, threads: int) -> ort.InferenceSession:
    return open_session(path, session_options(threads), device)


def _spec_of(session: ort.InferenceSession) -> LanguageModelSpec:
    metadata = session.get_modelmeta().custom_metadata_map
    if METADATA_KEY not in metadata:
        raise RepositoryError(
            f"The graph has no metadata {METADATA_KEY!r}: it is not a language model that "
            "`cosytriton export` made. Export it again."
        )
    return LanguageModelSpec.from_json(metadata[METADATA_KEY])
