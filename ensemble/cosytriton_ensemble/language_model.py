"""The exported language model on ONNX Runtime, with a key-value cache that rows join and leave."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.sampling import FloatArray, RepetitionAwareSampler

TokenIds = npt.NDArray[np.int32]

METADATA_KEY = "cosytriton.llm"
CAPACITY_STEP = 64  # positions by which a cache grows: its rows are copied once in so many steps


@dataclass(frozen=True, slots=True)
class LanguageModelSpec:
    """What a graph says about itself in its metadata.

    Ids are unified: text id t is t, speech id s is `speech_offset` + s, then come the two marks.
    """

    speech_offset: int  # first unified id of speech
    speech_codes: int  # ids below this are speech, the others special
    speech_rows: int  # width of the logits
    sos_id: int  # unified
    task_id: int  # unified
    eos_id: int  # speech id that is ruled out before the minimum length
    stop_ids: frozenset[int]  # speech ids that end the speech
    layers: int
    kv_heads: int
    head_dim: int
    sampler: RepetitionAwareSampler

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the metadata text.

        Raises:
            RepositoryError: It is no JSON or lacks a field.

        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["sampler"] = RepetitionAwareSampler(**fields.pop("sampling"))
            fields["stop_ids"] = frozenset(fields["stop_ids"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as cause:
            raise RepositoryError(
                f"The metadata {METADATA_KEY!r} of the language model does not fit this version ({cause}); "
                f"it is {text!r}. Export the model again."
            ) from cause

    def prompt(self, text: Sequence[int], prompt_speech: Sequence[int]) -> TokenIds:
        """Lay out what the model starts from: unified ids [1 + text + 1 + prompt speech] (CosyVoice 2)."""
        speech = [self.speech_offset + code for code in prompt_speech]
        return np.array([self.sos_id, *text, self.task_id, *speech], np.int32)


class KeyValueCache:
    """Keys and values of every layer, [rows, kv_heads, capacity, head_dim] float32 each.

    The first rows are contiguous, so a prefix of them is a tensor that a graph can update in place.
    """

    def __init__(self, spec: LanguageModelSpec, rows: int) -> None:
        names = [f"{kind}_cache.{layer}" for layer in range(spec.layers) for kind in ("key", "value")]
        self._shape = (rows, spec.kv_heads, spec.head_dim)
        self.capacity = 0  # positions
        self.buffers: Mapping[str, FloatArray] = {name: self._empty(0) for name in names}

    def _empty(self, capacity: int) -> FloatArray:
        rows, heads, width = self._shape
        return np.zeros((rows, heads, capacity, width), np.float32)  # pages of untouched rows stay unmapped

    def fit(self, positions: int, rows: int) -> bool:
        """Make the capacity the grid's next size above `positions`, keep `rows`; whether it changed."""
        capacity = -(-positions // CAPACITY_STEP) * CAPACITY_STEP
        if capacity == self.capacity:
            return False
        kept = min(capacity, self.capacity)
        resized = {name: self._empty(capacity) for name in self.buffers}
        for name, buffer in self.buffers.items():
            resized[name][:rows, :, :kept] = buffer[:rows, :, :kept]
        self.buffers, self.capacity = resized, capacity  # all or nothing: a MemoryError leaves it whole
        return True

    def clear(self, row: int) -> None:
        """Zero a row. Positions behind a row's end are masked, but a masked NaN would still spread."""
        for buffer in self.buffers.values():
            buffer[row] = 0

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy the first `positions` of a row over another row, and zero what is behind them."""
        for buffer in self.buffers.values():
            buffer[target, :, :positions] = buffer[source, :, :positions]
            buffer[target, :, positions:] = 0


class LanguageModel:
    """One session and the rows that it is decoding; a row is a request's sequence.

    Rows 0..n-1 are in use. They are bound to the session by pointer and updated in place. Not thread-safe.

    Args:
        session: A session on the CPU with an exported language model.
        rows: How many rows can be decoded at once.
        max_positions: The longest sequence of a row, prompt and speech together.

    Raises:
        RepositoryError: The graph is not an exported language model.

    """

    def __init__(self, session: ort.InferenceSession, rows: int = 8, max_positions: int = 4096) -> None:
        metadata = session.get_modelmeta().custom_metadata_map
        if METADATA_KEY not in metadata:
            raise RepositoryError(
                f"The graph has no metadata {METADATA_KEY!r}: it is not a language model that "
                "`cosytriton export` made. Export it again."
            )
        self.spec = LanguageModelSpec.from_json(metadata[METADATA_KEY])
        self.rows, self.max_positions = rows, max_positions
        self._session = session
        self.cache = KeyValueCache(self.spec, rows)
        self._counts: list[int] = []  # positions in the cache, one for each row in use
        self._ids = np.zeros((rows, 1), np.int32)
        self._past = np.zeros(rows, np.int32)
        self._new = np.ones(rows, np.int32)
        self._logits = np.zeros((rows, self.spec.speech_rows), np.float32)
        self._bindings: dict[int, ort.IOBinding] = {}  # of a step, by its number of rows

    @classmethod
    def open(cls, path: Path, *, threads: int = 0, rows: int = 8, max_positions: int = 4096) -> Self:
        """Load a graph on the CPU; `threads` = 0 takes every core."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.enable_mem_pattern = False  # shapes change from call to call
        # The other stages compute between the steps: idle threads must not spin on their cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return cls(session, rows, max_positions)

    def join(self, ids: TokenIds) -> FloatArray:
        """Take the next free row for a prompt [n] of unified ids; logits [speech_rows] of what follows.

        If it raises, no row was taken.
        """
        row = len(self._counts)
        self._fit([*self._counts, ids.size])
        self.cache.clear(row)
        past, new = np.zeros(1, np.int32), np.array([ids.size], np.int32)
        binding = self._bind(ids[None], past, new, slice(row, row + 1))
        self._session.run_with_iobinding(binding)
        self._counts.append(ids.size)
        logits: FloatArray = self._logits[row]
        return logits

    def step(self, ids: Sequence[int]) -> FloatArray:
        """Feed one unified id to every row in use; logits [rows in use, speech_rows].

        The result is valid until the next call and may be overwritten.
        """
        rows = len(self._counts)
        self._fit([count + 1 for count in self._counts])
        used = slice(0, rows)
        if rows not in self._bindings:
            self._bindings[rows] = self._bind(self._ids[used], self._past[used], self._new[used], used)
        self._ids[used, 0], self._past[used] = ids, self._counts
        self._session.run_with_iobinding(self._bindings[rows])
        self._counts = [count + 1 for count in self._counts]
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

    def _bind(self, ids: TokenIds, past: TokenIds, new: TokenIds, rows: slice) -> ort.IOBinding:
        """Bind inputs and outputs by pointer; the caller keeps the arrays alive."""
        binding = self._session.io_binding()
        for name, array in (("input_ids", ids), ("past_counts", past), ("new_counts", new)):
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        logits = self._logits[rows]
        binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        for name, buffer in self.cache.buffers.items():
            place = ("cpu", 0, buffer.dtype, buffer[rows].shape, buffer[rows].ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("_cache.", "_cache_out."), *place)
        return binding
