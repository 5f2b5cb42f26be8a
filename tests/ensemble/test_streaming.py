"""The chunks of a piece of speech: when they are made, and how they are joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, FAMILIES, Family
from cosytriton_ensemble.pipeline import MEL_BINS, pipeline_of
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.streaming import (
    Chunks,
    ChunkVocoder,
    FlowCall,
    GridChunks,
    OverlapChunks,
    Tempo,
    chunks_of,
    fade_window,
    vocoder_of,
)

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def calls(chunks: Chunks, total: int, arrivals: Sequence[int] | None = None) -> list[FlowCall]:
    """Every call of a piece whose language model gives `total` tokens.

    `arrivals` are the numbers of tokens at which the schedule is asked; default: after each one.
    """
    made = []
    for tokens in range(total + 1) if arrivals is None else arrivals:
        while call := chunks.next_call(tokens, ended=False):
            made.append(call)
    while call := chunks.next_call(total, ended=True):
        made.append(call)
    assert chunks.finished
    return made


def grid(prompt_tokens: int, family: Family = COSYVOICE2) -> GridChunks:
    return GridChunks(family, prompt_tokens, streamed=True, official=True)


def middle(first: int, end: int, spoken: int) -> FlowCall:
    return FlowCall(first, end, spoken, streaming=True, finalize=False)


def last(first: int, end: int, spoken: int) -> FlowCall:
    return FlowCall(first, end, spoken, streaming=False, finalize=True)


class TestGridChunks:
    def test_schedule_is_the_official_one(self) -> None:
        # 13 prompt tokens need 12 more to fill a block of 25, so the first chunk has 25 + 12 tokens.
        assert calls(grid(13), 100) == [middle(0, 40, 37), middle(0, 90, 50), last(0, 100, 13)]

    def test_hop_grows_to_its_limit(self) -> None:
        assert [call.spoken for call in calls(grid(0), 500)] == [25, 50, 100, 100, 100, 100, 25]

    def test_a_second_request_begins_with_the_short_hop_again(self) -> None:
        assert calls(grid(13), 400) == calls(grid(13), 400)

    @pytest.mark.parametrize(
        ("total", "wanted"),
        [
            (0, []),
            (1, [last(0, 1, 1)]),
            (27, [last(0, 27, 27)]),  # the model ends one token before the first chunk could be made
            (28, [middle(0, 28, 25), last(0, 28, 3)]),  # exactly enough: the end holds the lookahead
            (29, [middle(0, 28, 25), last(0, 29, 4)]),
            (77, [middle(0, 28, 25), last(0, 77, 52)]),
            (78, [middle(0, 28, 25), middle(0, 78, 50), last(0, 78, 3)]),
        ],
    )
    def test_end_of_the_language_model(self, total: int, wanted: list[FlowCall]) -> None:
        assert calls(grid(0), total) == wanted

    def test_the_last_chunk_continues_the_mask_of_those_before_it(self) -> None:
        chunks = GridChunks(COSYVOICE2, 0, streamed=True)
        wanted = [*calls(grid(0), 77)[:-1], FlowCall(0, 77, 52, streaming=True, finalize=True)]
        assert calls(chunks, 77) == wanted

    def test_a_piece_of_one_chunk_is_that_of_a_piece_that_is_not_streamed(self) -> None:
        assert calls(GridChunks(COSYVOICE2, 0, streamed=True), 27) == calls(
            GridChunks(COSYVOICE2, 0, streamed=False), 27
        )

    def test_does_not_depend_on_how_tokens_arrive(self) -> None:
        assert calls(grid(7), 333, [333]) == calls(grid(7), 333, [50, 51, 200]) == calls(grid(7), 333)

    @pytest.mark.parametrize("prompt_tokens", [0, 1, 24, 25, 26, 187])
    def test_chunks_end_on_the_grid_of_the_block_mask(self, prompt_tokens: int) -> None:
        for call in calls(grid(prompt_tokens), 700)[:-1]:
            assert (prompt_tokens + call.end - COSYVOICE2.lookahead) % COSYVOICE2.hop_tokens == 0


class TestOverlapChunks:
    def test_schedule_is_the_official_one(self) -> None:
        """Golden: 170 tokens are spoken as 120 and 70."""
        chunks = OverlapChunks(COSYVOICE1, prompt_frames=51, streamed=True, official=False)
        assert calls(chunks, 170) == [middle(0, 120, 100), last(100, 170, 70)]

    @pytest.mark.parametrize("tokens", [1, 119, 120, 121, 220, 333])
    def test_frames_of_all_chunks_are_the_official_total(self, tokens: int) -> None:
        """Every hop of 100 tokens gives 172 frames (206 of 120 tokens, less the 34 that are shared)."""
        frames = [len(mel) for mel in mels(COSYVOICE1, tokens)]
        hops, left = max(0, tokens - 20) // 100, tokens - 100 * (max(0, tokens - 20) // 100)
        assert sum(frames) == 172 * hops + left * 22050 // 12800

    def test_a_chunk_begins_with_the_noise_and_the_encoder_output_of_the_last(self) -> None:
        """51 frames of prompt on a grid of 87: what stands behind them is no cache."""
        chunks = OverlapChunks(COSYVOICE1, prompt_frames=51, streamed=True, official=False)
        first = chunks.next_call(400, ended=False)
        assert first is not None
        assert chunks.inputs(first)["mu_cache_count"].tolist() == [0]
        cache = np.arange(121 * MEL_BINS, dtype=np.float32).reshape(121, MEL_BINS)
        chunks.mel(first, flow(COSYVOICE1, first, 0) | {"mu_cache_out": cache})
        second = chunks.next_call(400, ended=False)
        assert second is not None
        feed = chunks.inputs(second)
        assert feed["noise_offset"].tolist() == [172]
        assert feed["mu_cache"].shape == (87 + 34, MEL_BINS)
        assert np.array_equal(feed["mu_cache"][:85], cache[:85])
        assert feed["mu_cache_count"].tolist() == [51 + 34]


def flow(family: Family, call: FlowCall, start: int) -> Feed:
    """Stand in for the flow: a frame's bins hold its place in the piece, on a padded tensor."""
    count = family.frames(call.end - call.first)
    if not call.finalize and not family.fade_frames:
        count -= family.frames(family.lookahead)
    frames = np.repeat(np.arange(start, start + count, dtype=np.float32)[:, None], MEL_BINS, axis=1)
    extent = pipeline_of(family).frames.padded(count)
    return {
        "mel": np.pad(frames, ((0, extent - count), (0, 0))),
        "frame_count": np.array([count], np.int32),
        "mu_cache_out": np.zeros((1, MEL_BINS), np.float32),
    }


def mels(family: Family, tokens: int, prompt: int = 13) -> list[Array]:
    """The new frames of every chunk through the stand-in."""
    voice = {
        "prompt_token_count": np.array([prompt], np.int32),
        "prompt_frame_count": np.array([51], np.int32),
    }
    chunks, taken, made = chunks_of(family, voice, streamed=True, official=False), 0, []
    for call in calls_lazily(chunks, tokens):
        made.append(chunks.mel(call, flow(family, call, taken if family.fade_frames else 0)))
        taken += len(made[-1])
    return made


def calls_lazily(chunks: Chunks, tokens: int) -> Sequence[FlowCall]:
    made = []
    while call := chunks.next_call(tokens, ended=True):
        made.append(call)
    return made


@EVERY_FAMILY
@pytest.mark.parametrize("tokens", [1, 27, 28, 120, 121, 404])
def test_every_frame_is_given_once_and_in_its_place(family: Family, tokens: int) -> None:
    frames = np.concatenate(mels(family, tokens))
    assert np.allclose(frames[:, 0], np.arange(len(frames)), atol=1e-3)


@EVERY_FAMILY
def test_a_piece_that_is_not_streamed_is_one_call(family: Family) -> None:
    voice = {
        "prompt_token_count": np.array([13], np.int32),
        "prompt_frame_count": np.array([51], np.int32),
    }
    assert calls(chunks_of(family, voice, streamed=False, official=False), 404) == [last(0, 404, 404)]


def speak(family: Family, feed: Feed) -> Feed:
    """Stand in for the vocoder: each frame's samples count on from the hop times its first bin."""
    hop, count = family.mel_hop, int(feed["frame_count"][0])
    waveform = (feed["mel"][:, :1] * hop + np.arange(hop)).reshape(-1).astype(np.float32)
    if not feed.get("finalize", np.array([True]))[0]:
        count = max(0, count - 5)
    return {
        "waveform": waveform,
        "source": waveform + 0.5,
        "sample_count": np.array([count * hop], np.int32),
        "phase_out": np.array([0.25], np.float32),
    }


def stream(family: Family, tokens: int, prompt: int = 13) -> list[Array]:
    """The chunks of a piece through the stand-ins; every sample should be its own position."""
    made, vocoder = mels(family, tokens, prompt), vocoder_of(family, official=False)
    spoken = []
    for i, mel in enumerate(made):
        final = i == len(made) - 1
        spoken.append(vocoder.emit(speak(family, vocoder.feed(mel, final)), final))
    return spoken


class TestVocoder:
    @EVERY_FAMILY
    @pytest.mark.parametrize("seed", range(8))
    def test_every_sample_is_spoken_once_and_in_its_place(self, family: Family, seed: int) -> None:
        prompt, tokens = np.random.default_rng(seed).integers([0, 1], [200, 400])
        speech = np.concatenate(stream(family, int(tokens), int(prompt)))
        assert len(speech) == sum(map(len, mels(family, int(tokens), int(prompt)))) * family.mel_hop
        assert np.allclose(speech, np.arange(len(speech)), atol=0.5)

    @pytest.mark.parametrize(
        ("family", "tokens", "samples"),
        [
            (COSYVOICE1, 170, [38912, 35840]),
            (COSYVOICE2, 100, [31680, 48000, 16320]),
            (COSYVOICE3, 100, [33120, 48000, 14880]),
        ],
    )
    def test_chunks_have_the_official_lengths(self, family: Family, tokens: int, samples: list[int]) -> None:
        """Version 3 holds 5 frames back, the official one 8, of which it needs 5."""
        assert [len(chunk) for chunk in stream(family, tokens)] == samples

    @EVERY_FAMILY
    def test_feed_is_what_the_stage_declares(self, family: Family) -> None:
        pipeline = pipeline_of(family)
        feed = vocoder_of(family, official=False).feed(np.ones((50, MEL_BINS), np.float32), False)
        assert feed.keys() == {tensor.name for tensor in pipeline.vocoder.inputs}
        for tensor in pipeline.vocoder.inputs:
            assert feed[tensor.name].dtype == tensor.numpy_type
            assert feed[tensor.name].ndim == len(tensor.dims)
        assert feed["mel"].shape[0] % pipeline.frames.step == 0

    def test_second_chunk_continues_the_source_of_the_first(self) -> None:
        """What is cached ends at the centre of the last frame, where the phase is carried to."""
        family, hop = COSYVOICE2, COSYVOICE2.mel_hop
        vocoder = vocoder_of(family, official=False)
        first = vocoder.feed(np.full((50, MEL_BINS), 1, np.float32), False)
        assert [int(first[name][0]) for name in ("source_cache_count", "phase_frame")] == [0, -1]
        vocoder.emit(speak(family, first), final=False)
        second = vocoder.feed(np.full((100, MEL_BINS), 2, np.float32), False)
        assert second["frame_count"].tolist() == [8 + 100]
        assert second["mel"][:110, 0].tolist() == [1] * 8 + [2] * 100 + [0, 0]  # two frames of padding
        cached = 8 * hop - hop // 2
        assert second["source_cache_count"].tolist() == [cached]
        source = speak(family, first)["source"][42 * hop : 42 * hop + cached]
        assert np.array_equal(second["source_cache"][:cached], source)
        assert second["noise_offset"].tolist() == [(50 - 8) * hop]  # the place in the whole piece
        assert (second["phase"].tolist(), second["phase_frame"].tolist()) == ([0.25], [7])

    def test_a_causal_chunk_begins_with_the_context_of_its_samples(self) -> None:
        family, hop = COSYVOICE3, COSYVOICE3.mel_hop
        vocoder = vocoder_of(family, official=False)
        assert (
            len(vocoder.emit(speak(family, vocoder.feed(np.zeros((4, MEL_BINS), np.float32), False)), False))
            == 0
        )
        for spoken, frames in ((0, 20), (19, 80), (99, 100)):
            feed = vocoder.feed(np.ones((frames, MEL_BINS), np.float32), False)
            context = min(spoken, family.context_frames)
            assert feed["frame_count"].tolist() == [context + (4 if spoken == 0 else 5) + frames]
            assert feed["noise_offset"].tolist() == [(spoken - context) * hop]
            assert feed["phase_frame"].tolist() == [context - 1]
            assert feed["phase"].tolist() == ([0.25] if spoken else [0])
            vocoder.emit(speak(family, feed), final=False)

    def test_official_second_chunk_starts_the_phase_anew(self) -> None:
        vocoder = vocoder_of(COSYVOICE2, official=True)
        vocoder.emit(speak(COSYVOICE2, vocoder.feed(np.ones((50, MEL_BINS), np.float32), False)), False)
        second = vocoder.feed(np.ones((50, MEL_BINS), np.float32), False)
        assert second["source_cache_count"].tolist() == [8 * 480]
        assert (second["phase"].tolist(), second["phase_frame"].tolist()) == ([0], [-1])


class TestFade:
    @pytest.mark.parametrize("size", [34, 3840, 5120])
    def test_halves_sum_to_one(self, size: int) -> None:
        rise, fall = np.split(fade_window(size), 2)
        assert np.allclose(rise + fall, 1, atol=1e-6)
        assert np.all(np.diff(rise) >= 0)

    @pytest.mark.parametrize(("official", "level"), [(False, 1), (True, 1.08)])
    def test_a_steady_signal_stays_steady_but_not_with_the_official_window(
        self, official: bool, level: float
    ) -> None:
        assert joint_level(vocoder_of(COSYVOICE2, official)) == pytest.approx(level, abs=1e-3)


def joint_level(vocoder: ChunkVocoder) -> float:
    """The loudest sample of a constant 1 that is spoken in two chunks."""
    levels = []
    for final in (False, True):
        feed = vocoder.feed(np.zeros((50, MEL_BINS), np.float32), final)
        outputs = speak(COSYVOICE2, feed) | {"waveform": np.ones(feed["mel"].shape[0] * 480, np.float32)}
        levels.append(float(vocoder.emit(outputs, final).max()))
    return max(levels)


class TestTempo:
    @pytest.mark.parametrize("speed", [0.5, 0.75, 1.0, 1.25, 2.0])
    def test_is_the_official_interpolation(self, speed: float) -> None:
        """F.interpolate(size=int(T / speed), mode="linear"), as the official token2wav does."""
        torch = pytest.importorskip("torch")
        mel = np.random.default_rng(0).normal(size=(101, MEL_BINS)).astype(np.float32)
        wanted = torch.nn.functional.interpolate(
            torch.from_numpy(mel.T[None]), size=int(101 / speed), mode="linear"
        )
        np.testing.assert_allclose(Tempo(speed).change(mel, True), wanted[0].numpy().T, atol=1e-4)

    @pytest.mark.parametrize("speed", [0.5, 0.8, 1.3, 2.0])
    @pytest.mark.parametrize("sizes", [(50, 100, 26), (50, 1), (172, 172, 172, 34), (3,), (60, 60, 0)])
    def test_chunks_give_the_frames_of_the_whole(self, speed: float, sizes: tuple[int, ...]) -> None:
        total = sum(sizes)
        mel = np.repeat(np.arange(total, dtype=np.float32)[:, None], MEL_BINS, axis=1)
        tempo = Tempo(speed)
        parts = np.split(mel, np.cumsum(sizes)[:-1])
        made = np.concatenate([tempo.change(part, i == len(parts) - 1) for i, part in enumerate(parts)])
        assert len(made) == max(1, int(total / speed))
        wanted = np.clip((np.arange(len(made)) + 0.5) * speed - 0.5, 0, total - 1)
        tolerance = 0.51 if len(sizes) == 1 else 1e-3
        assert np.allclose(made[:, 0], wanted, atol=tolerance)
