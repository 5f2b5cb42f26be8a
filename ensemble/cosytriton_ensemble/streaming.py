"""Chunks of a piece of speech: when to call the flow, and how the chunks of mel and sound are joined.

Official: `tts` of CosyVoiceModel (v1), CosyVoice2Model (v2) and CosyVoice3Model (v3), with their faults
mended: hops belong to one request, the halves of a cross-fade sum to 1, and the source of a chunk continues
the phase of the chunk before. `official=True` brings the last two back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.pipeline import MEL_BINS, pipeline_of
from cosytriton_ensemble.spec import Array, Feed

HOP_GROWTH = 2
"""A chunk's length over that of the chunk before: the first comes early, the later ones cost less."""


@dataclass(frozen=True, slots=True)
class FlowCall:
    """One call of the flow for a chunk."""

    first: int  # of the piece's tokens to give
    end: int  # behind the last one to give
    spoken: int  # tokens that this chunk adds to the speech
    streaming: bool
    finalize: bool


class Chunks(Protocol):
    """Says when the tokens of a piece suffice for its next chunk, and takes the chunk's mel from the flow."""

    finished: bool

    def next_call(self, tokens: int, ended: bool) -> FlowCall | None:
        """Take the next chunk that can be made of the `tokens` so far, or None: wait.

        `ended` says that no more tokens will come. To be asked again until it gives None; after the last
        chunk it is `finished`.
        """

    def inputs(self, call: FlowCall) -> Feed:
        """Make the flow's inputs that belong to the chunk, without batch dimension."""

    def mel(self, call: FlowCall, outputs: Feed) -> Array:
        """Take the flow's outputs; returns the new mel frames [n, mel bins]."""


class GridChunks:
    """Chunks of CosyVoice 2 and 3 (arXiv 2412.10117).

    A chunk ends on the grid of the flow's block mask, counted with the prompt, so that a later chunk never
    changes an earlier one. Its call gives all tokens so far and `lookahead` more. A piece of one chunk, as
    every one that is not `streamed`, is computed with full attention; `official`ly the last chunk is too,
    with other frames than those that the chunks before it continue.
    """

    def __init__(self, family: Family, prompt_tokens: int, streamed: bool, official: bool = False) -> None:
        self._family, self._streamed, self._official = family, streamed, official
        self._offset = 0  # tokens
        self._hop = family.hop_tokens
        self._chunk = family.first_chunk(prompt_tokens)
        self.finished = False

    @property
    def needed(self) -> float:
        """Tokens that the next chunk waits for, unless the language model ends before."""
        return self._offset + self._chunk + self._family.lookahead if self._streamed else math.inf

    def next_call(self, tokens: int, ended: bool) -> FlowCall | None:
        """See `Chunks`."""
        if self.finished:
            return None
        if tokens >= self.needed:
            end = self._offset + self._chunk
            call = FlowCall(0, end + self._family.lookahead, self._chunk, streaming=True, finalize=False)
            self._offset = end
            self._chunk = self._hop = min(self._hop * HOP_GROWTH, self._family.max_hop_tokens)
            return call
        if not ended:
            return None
        self.finished = True
        masked, spoken = self._offset > 0 and not self._official, tokens - self._offset
        return FlowCall(0, tokens, spoken, streaming=masked, finalize=True) if tokens else None

    def inputs(self, call: FlowCall) -> Feed:
        """See `Chunks`."""
        return {names.STREAMING: np.array([call.streaming]), names.FINALIZE: np.array([call.finalize])}

    def mel(self, call: FlowCall, outputs: Feed) -> Array:
        """See `Chunks`."""
        count = int(outputs[names.FRAME_COUNT][0])
        return outputs[names.MEL][count - self._family.frames(call.spoken) : count]


class OverlapChunks:
    """Chunks of CosyVoice-300M (arXiv 2407.05407).

    A chunk is computed from its own tokens and the reference alone. Its last `fade_frames` are held back and
    cross-faded with the first ones of the next chunk, which starts from the same noise and the same encoder
    output there.
    """

    def __init__(self, family: Family, prompt_frames: int, streamed: bool, official: bool) -> None:
        self._family, self._streamed, self._official = family, streamed, official
        self._prompt_frames = prompt_frames
        self._first = 0  # token
        self._frame = 0  # at which the chunk begins
        self._held = np.zeros((0, MEL_BINS), np.float32)
        self._cache = np.zeros((0, MEL_BINS), np.float32)
        self.finished = False

    def next_call(self, tokens: int, ended: bool) -> FlowCall | None:
        """See `Chunks`."""
        if self.finished:
            return None
        hop, given = self._family.hop_tokens, self._family.hop_tokens + self._family.lookahead
        if self._streamed and tokens - self._first >= given:
            call = FlowCall(self._first, self._first + given, hop, streaming=True, finalize=False)
            self._first += hop
            return call
        if not ended:
            return None
        self.finished = True
        left = tokens - self._first
        return FlowCall(self._first, tokens, left, streaming=False, finalize=True) if tokens else None

    def inputs(self, call: FlowCall) -> Feed:  # noqa: ARG002  (of `Chunks`)
        """See `Chunks`."""
        # On the grid of the prompt's mel, so that requests of a batch have one shape.
        grid = pipeline_of(self._family).prompt_frames
        extent = grid.padded(self._prompt_frames) + self._family.fade_frames
        return {
            names.NOISE_OFFSET: _number(self._frame),
            names.MU_CACHE: np.pad(self._cache, ((0, extent - len(self._cache)), (0, 0))),
            names.MU_CACHE_COUNT: _number(len(self._cache)),
        }

    def mel(self, call: FlowCall, outputs: Feed) -> Array:
        """See `Chunks`."""
        fade = self._family.fade_frames
        mel = outputs[names.MEL][: int(outputs[names.FRAME_COUNT][0])].copy()
        if shared := min(len(self._held), len(mel)):
            rise, fall = np.split(fade_window(fade, self._official)[:, None], 2)
            mel[:shared] = mel[:shared] * rise[:shared] + self._held[:shared] * fall[:shared]
        if call.finalize:
            return mel
        self._frame += len(mel) - fade
        self._held = mel[-fade:]
        self._cache = outputs[names.MU_CACHE_OUT][: self._prompt_frames + fade]
        return mel[:-fade]


def chunks_of(family: Family, voice: Feed, streamed: bool, official: bool) -> Chunks:
    """The chunks of one piece: `voice` has the prompt that the flow hears."""
    if family.fade_frames:
        return OverlapChunks(family, int(voice[names.PROMPT_FRAME_COUNT][0]), streamed, official)
    return GridChunks(family, int(voice[names.PROMPT_TOKEN_COUNT][0]), streamed, official)


def fade_window(size: int, official: bool = False) -> Array:
    """Make a cross-fade, FP32 [2 * size]: a rising half and the falling one, which sum to 1.

    The official window is Hamming's, whose halves sum to 1.08: it makes a joint louder.
    """
    if official:
        return np.hamming(2 * size).astype(np.float32)
    rise = np.sin(np.pi / 2 * (np.arange(size) + 0.5) / size) ** 2
    window: Array = np.concatenate([rise, 1 - rise]).astype(np.float32)
    return window


class Tempo:
    """Changes the speed of mel frames by linear interpolation, chunk by chunk.

    Official: `token2wav` with `speed`, for speech in one piece. Chunks of a stream give the same frames up to
    the rounding of the piece's length.
    """

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._taken = 0  # frames that were given, without the rest
        self._made = 0
        self._rest = np.zeros((0, MEL_BINS), np.float32)

    def change(self, mel: Array, final: bool) -> Array:
        """Take new frames [n, mel bins]; returns those that can be made of them and the earlier ones."""
        if self._speed == 1:
            return mel
        frames = np.concatenate([self._rest, mel])
        total, step = self._taken + len(frames), self._speed
        if final:
            end = max(1, int(total / step))
            step = step if self._made else total / end
        else:
            end = max(self._made, int((total - 1.5) / step + 0.5))
        place = np.clip((np.arange(self._made, end) + 0.5) * step - 0.5, 0, total - 1) - self._taken
        left = place.astype(np.int64)
        right = np.minimum(left + 1, len(frames) - 1)
        share = (place - left).astype(np.float32)[:, None]
        made: Array = frames[left] * (1 - share) + frames[right] * share
        self._made = end
        used = min(len(frames) - 1, max(0, int((end + 0.5) * step - 0.5) - self._taken))
        self._taken, self._rest = self._taken + used, frames[used:]
        return made


class ChunkVocoder(Protocol):
    """Joins the vocoder's chunks of one piece."""

    def feed(self, mel: Array, final: bool) -> Feed:
        """Make the vocoder's inputs, without batch dimension, from the new frames [frames, mel bins]."""

    def emit(self, outputs: Feed, final: bool) -> Array:
        """Take the vocoder's outputs; returns the samples to speak, FP32 [n]."""


class FadingVocoder:
    """Joins chunks of the HiFT of v1 and v2.

    Each chunk begins with the last mel frames and the last source samples of the chunk before; the two
    versions of the audio that they share are cross-faded. So a chunk holds its end back until it knows
    the next one.
    """

    def __init__(self, family: Family, official: bool, gathered: bool = True) -> None:
        self._family, self._official, self._gathered = family, official, gathered
        self._frames = pipeline_of(family).frames
        self._rise, self._fall = np.split(fade_window(family.overlap_samples, official), 2)
        self._start = 0  # mel frame of the piece at which the present chunk begins
        self._mel: Array | None = None  # the present chunk, [frames, mel bins]
        self._source = np.zeros(0, np.float32)  # its first samples, from the chunk before
        self._speech = np.zeros(0, np.float32)
        self._phase = np.zeros(1, np.float32)

    def feed(self, mel: Array, final: bool) -> Feed:  # noqa: ARG002  (of `ChunkVocoder`)
        """See `ChunkVocoder`."""
        overlap = self._family.overlap_frames
        continued = self._mel is not None
        if self._mel is not None:
            self._start += len(self._mel) - overlap
            mel = np.concatenate([self._mel[-overlap:], mel])
        self._mel = mel
        cache = np.zeros(self._family.overlap_samples, np.float32)
        cache[: len(self._source)] = self._source
        return {
            **_mel_feed(mel, self._frames.padded(len(mel), self._gathered)),
            names.SOURCE_CACHE: cache,
            names.SOURCE_CACHE_COUNT: _number(len(self._source)),
            names.NOISE_OFFSET: _number(self._start * self._family.mel_hop),
            names.PHASE: self._phase,
            names.PHASE_FRAME: _number(overlap - 1 if continued and not self._official else -1),
        }

    def emit(self, outputs: Feed, final: bool) -> Array:
        """See `ChunkVocoder`."""
        assert self._mel is not None, "feed() comes before emit()"
        count, overlap = len(self._mel) * self._family.mel_hop, self._family.overlap_samples
        speech = outputs[names.WAVEFORM][:count].copy()
        if len(self._speech):
            speech[:overlap] = speech[:overlap] * self._rise + self._speech * self._fall
        if final:
            return speech
        kept = count if self._official else count - self._family.source_hold
        self._source = outputs[names.SOURCE][count - overlap : kept].copy()
        self._speech = speech[-overlap:].copy()
        if not self._official:
            self._phase = outputs[names.PHASE_OUT]
        return speech[:-overlap]


class CausalVocoder:
    """Joins chunks of the causal HiFT of v3.

    Each chunk begins with the frames before it that its samples depend on; their samples are dropped.
    """

    def __init__(self, family: Family, gathered: bool = True) -> None:
        self._family, self._gathered = family, gathered
        self._frames = pipeline_of(family).frames
        self._mel = np.zeros((0, MEL_BINS), np.float32)  # the present chunk and its context
        self._next = self._spoken = 0  # frames before the next to speak: in `_mel`, and in the piece
        self._phase = np.zeros(1, np.float32)

    def feed(self, mel: Array, final: bool) -> Feed:
        """See `ChunkVocoder`."""
        context = min(self._spoken, self._family.context_frames)
        self._mel = np.concatenate([self._mel[self._next - context :], mel])
        self._next = context
        return {
            **_mel_feed(self._mel, self._frames.padded(len(self._mel), self._gathered)),
            names.FINALIZE: np.array([final]),
            names.NOISE_OFFSET: _number((self._spoken - context) * self._family.mel_hop),
            names.PHASE: self._phase,
            names.PHASE_FRAME: _number(context - 1),
        }

    def emit(self, outputs: Feed, final: bool) -> Array:  # noqa: ARG002  (of `ChunkVocoder`)
        """See `ChunkVocoder`."""
        hop, count = self._family.mel_hop, int(outputs[names.SAMPLE_COUNT][0])
        speech = outputs[names.WAVEFORM][self._next * hop : count].copy()
        if len(speech):
            self._spoken += len(speech) // hop
            self._next, self._phase = count // hop, outputs[names.PHASE_OUT]
        return speech


def vocoder_of(family: Family, official: bool, gathered: bool = True) -> ChunkVocoder:
    """The vocoder's chunks of one piece; `gathered`: on the grid on which requests share a batch."""
    if family.overlap_frames:
        return FadingVocoder(family, official, gathered)
    return CausalVocoder(family, gathered)


def _mel_feed(mel: Array, extent: int) -> Feed:
    return {names.MEL: np.pad(mel, ((0, extent - len(mel)), (0, 0))), names.FRAME_COUNT: _number(len(mel))}


def _number(value: int) -> Array:
    return np.array([value], np.int32)
