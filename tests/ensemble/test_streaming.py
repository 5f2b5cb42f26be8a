"""The schedule of a streamed request and the joints of its chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cosytriton_ensemble.pipeline import COSYVOICE2, FRAMES, MEL_BINS, VOCODER
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.streaming import ChunkSchedule, ChunkVocoder, FlowCall, fade_window

FAMILY = COSYVOICE2
HOP = FAMILY.mel_hop
OVERLAP = FAMILY.overlap_samples


def calls(prompt_tokens: int, total: int, arrivals: Sequence[int] | None = None) -> list[FlowCall]:
    """Every call of a request whose language model gives `total` tokens.

    `arrivals` are the numbers of tokens at which the schedule is asked; default: after each one.
    """
    schedule = ChunkSchedule(prompt_tokens)
    made = []
    for tokens in range(total + 1) if arrivals is None else arrivals:
        while call := schedule.next_call(tokens, ended=False):
            made.append(call)
    while call := schedule.next_call(total, ended=True):
        made.append(call)
    assert schedule.finished
    return made


def middle(tokens: int, offset: int) -> FlowCall:
    return FlowCall(tokens, offset, streaming=True, finalize=False)


def last(tokens: int, offset: int) -> FlowCall:
    return FlowCall(tokens, offset, streaming=False, finalize=True)


class TestSchedule:
    def test_is_the_official_one(self) -> None:
        # 13 prompt tokens need 12 more to fill a block of 25, so the first chunk has 25 + 12 tokens.
        assert calls(13, 100) == [middle(40, 0), middle(90, 37), last(100, 87)]

    def test_hop_grows_to_its_limit(self) -> None:
        offsets = [call.offset for call in calls(0, 500)]
        assert offsets == [0, 25, 75, 175, 275, 375, 475]

    def test_two_requests_share_nothing(self) -> None:
        first = calls(13, 400)
        assert calls(13, 400) == first

    @pytest.mark.parametrize(
        ("total", "wanted"),
        [
            (0, []),
            (1, [last(1, 0)]),
            (27, [last(27, 0)]),  # the model ends one token before the first chunk could be made
            (28, [middle(28, 0), last(28, 25)]),  # exactly enough: the end holds the lookahead
            (29, [middle(28, 0), last(29, 25)]),
            (77, [middle(28, 0), last(77, 25)]),
            (78, [middle(28, 0), middle(78, 25), last(78, 75)]),
        ],
    )
    def test_end_of_the_language_model(self, total: int, wanted: list[FlowCall]) -> None:
        assert calls(0, total) == wanted

    def test_does_not_depend_on_how_tokens_arrive(self) -> None:
        assert calls(7, 333, [333]) == calls(7, 333, [50, 51, 200]) == calls(7, 333)

    def test_waits_for_as_many_tokens_as_it_says(self) -> None:
        schedule = ChunkSchedule(30)
        needed = schedule.needed
        assert schedule.next_call(needed - 1, ended=False) is None
        assert schedule.next_call(needed, ended=False) == middle(needed, 0)

    @pytest.mark.parametrize("prompt_tokens", [0, 1, 24, 25, 26, 187])
    def test_chunks_end_on_the_grid_of_the_block_mask(self, prompt_tokens: int) -> None:
        for call in calls(prompt_tokens, 700)[:-1]:
            assert (prompt_tokens + call.tokens - FAMILY.lookahead) % FAMILY.hop_tokens == 0


def mel_of(call: FlowCall, total: Array) -> Array:
    """The new frames of a call, cut out of the whole request's mel [frames, bins]."""
    tokens = call.tokens - (0 if call.finalize else FAMILY.lookahead)
    return total[call.offset * FAMILY.frames_per_token : tokens * FAMILY.frames_per_token]


def speak(feed: Feed) -> tuple[Array, Array]:
    """Stand in for the vocoder: each frame's samples count on from HOP times its first bin."""
    frames = feed["mel"][:, 0]
    waveform = (frames[:, None] * HOP + np.arange(HOP)).reshape(-1).astype(np.float32)
    return waveform, waveform + 0.5


def stream(prompt_tokens: int, tokens: int) -> list[Array]:
    """The chunks of a request through the stand-in; every sample should be its own position."""
    frames = np.arange(tokens * FAMILY.frames_per_token, dtype=np.float32)
    total = np.repeat(frames[:, None], MEL_BINS, axis=1)
    chunks, vocoder = [], ChunkVocoder()
    for call in calls(prompt_tokens, tokens):
        waveform, source = speak(vocoder.feed(mel_of(call, total)))
        chunks.append(vocoder.emit(waveform, source, call.finalize))
    return chunks


class TestVocoder:
    @pytest.mark.parametrize("seed", range(20))
    def test_every_sample_is_spoken_once_and_in_its_place(self, seed: int) -> None:
        prompt_tokens, tokens = np.random.default_rng(seed).integers([0, 1], [200, 400])
        speech = np.concatenate(stream(int(prompt_tokens), int(tokens)))
        assert len(speech) == tokens * FAMILY.samples_per_token
        assert np.allclose(speech, np.arange(len(speech)), atol=0.5)

    @pytest.mark.parametrize("tokens", [1, 4, 27, 28, 29, 77, 78])
    def test_short_requests_are_complete(self, tokens: int) -> None:
        assert sum(map(len, stream(0, tokens))) == tokens * FAMILY.samples_per_token

    def test_holds_the_shared_end_back(self) -> None:
        assert [len(chunk) for chunk in stream(13, 100)] == [31680, 48000, 16320]

    def test_feed_is_what_the_stage_declares(self) -> None:
        vocoder = ChunkVocoder()
        feed = vocoder.feed(np.ones((50, MEL_BINS), np.float32))
        assert feed.keys() == {tensor.name for tensor in VOCODER.inputs}
        for tensor in VOCODER.inputs:
            assert feed[tensor.name].dtype == tensor.numpy_type
            assert feed[tensor.name].ndim == len(tensor.dims)
        assert feed["mel"].shape[0] % FRAMES.step == 0

    def test_second_chunk_begins_with_the_end_of_the_first(self) -> None:
        vocoder = ChunkVocoder()
        first = vocoder.feed(np.full((50, MEL_BINS), 1, np.float32))
        assert [int(first[name][0]) for name in ("frame_count", "source_cache_count")] == [50, 0]
        vocoder.emit(*speak(first), final=False)
        second = vocoder.feed(np.full((100, MEL_BINS), 2, np.float32))
        assert second["frame_count"].tolist() == [FAMILY.overlap_frames + 100]
        assert second["mel"][:110, 0].tolist() == [1] * 8 + [2] * 100 + [0, 0]  # two frames of padding
        assert second["source_cache_count"].tolist() == [OVERLAP]
        assert np.array_equal(second["source_cache"], speak(first)[1][50 * HOP - OVERLAP : 50 * HOP])
        assert second["noise_offset"].tolist() == [(50 - 8) * HOP]  # the place in the whole request

    def test_noise_offset_follows_the_request(self) -> None:
        vocoder, offsets = ChunkVocoder(), []
        for frames in (74, 100, 200, 26):
            feed = vocoder.feed(np.zeros((frames, MEL_BINS), np.float32))
            offsets.append(int(feed["noise_offset"][0]) // HOP)
            vocoder.emit(*speak(feed), final=False)
        assert offsets == [0, 74 - 8, 174 - 8, 374 - 8]


class TestFade:
    def test_halves_sum_to_one(self) -> None:
        rise, fall = np.split(fade_window(OVERLAP), 2)
        assert np.allclose(rise + fall, 1, atol=1e-6)
        assert np.all(np.diff(rise) >= 0)

    def test_a_steady_signal_stays_steady_but_not_with_the_official_window(self) -> None:
        assert joint_level(ChunkVocoder()) == pytest.approx(1, abs=1e-6)
        assert joint_level(ChunkVocoder(window=np.hamming(2 * OVERLAP))) == pytest.approx(1.08, abs=1e-3)


def joint_level(vocoder: ChunkVocoder) -> float:
    """The loudest sample of a constant 1 that is spoken in two chunks."""
    levels = []
    for final in (False, True):
        feed = vocoder.feed(np.zeros((50, MEL_BINS), np.float32))
        signal = np.ones(feed["mel"].shape[0] * HOP, np.float32)
        levels.append(float(vocoder.emit(signal, signal, final).max()))
    return max(levels)
