"""Chunks of a streamed request: when to call the flow, and how the vocoder's chunks are joined.

CosyVoice 2, arXiv 2412.10117; official: `CosyVoice2Model.tts(stream=True)`, with two faults of it mended.
The hop grows within one request and is not shared with others, so that every first chunk is short. The
two halves of the cross-fade sum to 1; the official Hamming halves sum to 1.08, which makes a joint louder.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cosytriton_ensemble.pipeline import COSYVOICE2, FRAMES, Family
from cosytriton_ensemble.spec import Array, Feed

HOP_GROWTH = 2
"""A chunk's length over that of the chunk before: the first comes early, the later ones cost less."""


@dataclass(frozen=True, slots=True)
class FlowCall:
    """One call of the flow for a chunk."""

    tokens: int  # how many of the request's tokens to give, from its first
    offset: int  # tokens whose mel frames were used by earlier chunks
    streaming: bool
    finalize: bool


class ChunkSchedule:
    """Says when the tokens of a request suffice for its next chunk.

    A chunk ends on the grid of the flow's block mask, counted with the prompt, so that a later chunk
    never changes an earlier one. Its call also gives `lookahead` tokens behind its end. The last chunk is
    computed from all tokens with full attention.
    """

    def __init__(self, prompt_tokens: int, family: Family = COSYVOICE2) -> None:
        self._family = family
        self._offset = 0  # tokens
        self._hop = family.hop_tokens
        self._chunk = self._hop + -prompt_tokens % self._hop
        self.finished = False

    @property
    def needed(self) -> int:
        """Tokens that the next chunk waits for, unless the language model ends before."""
        return self._offset + self._chunk + self._family.lookahead

    def next_call(self, tokens: int, ended: bool) -> FlowCall | None:
        """Take the next chunk that can be made of the request's `tokens` so far, or None: wait.

        `ended` says that no more tokens will come. To be asked again until it gives None; after the last
        chunk it is `finished`.
        """
        if self.finished:
            return None
        if tokens >= self.needed:
            call = FlowCall(self.needed, self._offset, streaming=True, finalize=False)
            self._offset += self._chunk
            self._chunk = self._hop = min(self._hop * HOP_GROWTH, self._family.max_hop_tokens)
            return call
        if not ended:
            return None
        self.finished = True
        if tokens == 0:
            return None
        return FlowCall(tokens, self._offset, streaming=False, finalize=True)


def fade_window(samples: int) -> Array:
    """Make a cross-fade, FP32 [2 * samples]: a rising half and the falling one, which sum to 1."""
    rise = np.sin(np.pi / 2 * (np.arange(samples) + 0.5) / samples) ** 2
    window: Array = np.concatenate([rise, 1 - rise]).astype(np.float32)
    return window


class ChunkVocoder:
    """Joins the vocoder's chunks of one request.

    Each chunk begins with the last mel frames and the last source samples of the chunk before; the two
    versions of the audio that they share are cross-faded. So a chunk holds its end back until it knows
    the next one.
    """

    def __init__(self, family: Family = COSYVOICE2, window: Array | None = None) -> None:
        """`window`: the cross-fade, FP32 [2 * overlap], rising and falling half; default `fade_window`."""
        self._family = family
        overlap = family.overlap_samples
        self._rise, self._fall = np.split(fade_window(overlap) if window is None else window, 2)
        self._start = 0  # mel frame of the request at which the present chunk begins
        self._mel: Array | None = None  # the present chunk, [frames, mel bins]
        self._source = np.zeros(0, np.float32)  # its first samples, from the chunk before
        self._speech = np.zeros(0, np.float32)

    def feed(self, mel: Array) -> Feed:
        """Make the vocoder's inputs, without batch dimension, from the new frames [frames, mel bins]."""
        overlap = self._family.overlap_frames
        if self._mel is not None:
            self._start += len(self._mel) - overlap
            mel = np.concatenate([self._mel[-overlap:], mel])
        self._mel = mel
        padding = FRAMES.padded(len(mel)) - len(mel)
        cache = np.zeros(self._family.overlap_samples, np.float32)
        cache[: len(self._source)] = self._source
        return {
            "mel": np.pad(mel, ((0, padding), (0, 0))),
            "frame_count": _number(len(mel)),
            "source_cache": cache,
            "source_cache_count": _number(len(self._source)),
            "noise_offset": _number(self._start * self._family.mel_hop),
        }

    def emit(self, waveform: Array, source: Array, final: bool) -> Array:
        """Take the vocoder's FP32 [samples] outputs; returns the samples to speak, FP32 [n]."""
        assert self._mel is not None, "feed() comes before emit()"
        count, overlap = len(self._mel) * self._family.mel_hop, self._family.overlap_samples
        speech = waveform[:count].copy()
        if len(self._speech):
            speech[:overlap] = speech[:overlap] * self._rise + self._speech * self._fall
        if final:
            return speech
        self._source, self._speech = source[count - overlap : count].copy(), speech[-overlap:].copy()
        return speech[:-overlap]


def _number(value: int) -> Array:
    return np.array([value], np.int32)
