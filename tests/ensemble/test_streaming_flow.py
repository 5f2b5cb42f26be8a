"""The state of streams: what is kept, what is not computed twice, and what it may take.

The graph here stands in for the exported one: a mel frame is the sum of the ids of all frames up to it, so
that a frame shows whether its past was there, and the state of a frame is its id.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.pipeline import MEL_BINS
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.streaming import FlowCall, GridChunks
from cosytriton_ensemble.streaming_flow import StreamingFlow
from cosytriton_ensemble.voice import Voice

GRAPH = """
<ir_version: 10, opset_import: ["" : 23]>
sums (int32[1, n] tokens, int32[1, 1] token_count, int32[1, p] prompt_tokens, int32[1, 1] prompt_token_count,
      float[1, f, 80] prompt_mel, float[1, 192] speaker_embedding, int32[1, 1] token_end,
      float[past, 2, 2, 3] attention_state_0, float[past, 2, 2, 3] attention_state_1,
      float[2, 2, 4] convolution_state)
  => (float[1, t, 80] mel, float[t, 2, 2, 3] attention_state_out_0, float[t, 2, 2, 3] attention_state_out_1,
      float[2, 2, 4] convolution_state_out)
<int64[1] one = {1}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] all = {-1}, int64 axis = {1},
 int64[4] entry = {1, 2, 2, 3}, int64[4] column = {-1, 1, 1, 1}, int64[3] row = {1, -1, 1},
 int64[3] bins = {1, 1, 80}, int64[2] flat = {1, -1}, int64[3] twice = {1, 1, 2}>
{
  count = Reshape (prompt_token_count, all)
  wide = Cast <to = 7> (count)
  prompt = Slice (prompt_tokens, zero, wide, one)
  ids = Concat <axis = 1> (prompt, tokens)
  real = Cast <to = 1> (ids)
  deep = Unsqueeze (real, two)
  pairs = Expand (deep, twice)
  frames = Reshape (pairs, flat)
  last = Reshape (token_end, all)
  wider = Cast <to = 7> (last)
  end = Mul (wider, two)
  past = Shape <start = 0, end = 1> (attention_state_0)
  made = Slice (frames, past, end, one)
  columns = Reshape (made, column)
  attention_state_out_0 = Expand (columns, entry)
  attention_state_out_1 = Neg (attention_state_out_0)
  kept = ReduceSum <keepdims = 0> (attention_state_0)
  twelve = Constant <value_float = 12.0> ()
  before = Div (kept, twelve)
  sums = CumSum (made, axis)
  total = Add (sums, before)
  rows = Reshape (total, row)
  mel = Expand (rows, bins)
  length = Cast <to = 1> (past)
  convolution_state_out = Add (convolution_state, length)
}
"""
FRAME_BYTES = 2 * 12 * 4  # of both layers
PLENTY = 1 << 30


class Counting:
    """A session that counts the frames it computes, and can fail."""

    def __init__(self) -> None:
        graph = onnx.parser.parse_model(GRAPH).SerializeToString()
        for number in b"0", b"1":  # the parser knows no names with a dot
            for name in b"attention_state", b"attention_state_out":
                graph = graph.replace(name + b"_" + number, name + b"." + number)
        self._session: Any = ort.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self.frames: list[int] = []
        self.fail = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        if self.fail:
            raise RuntimeError("out of memory")
        self._session.run_with_iobinding(binding, options)
        self.frames.append(binding.get_outputs()[0].shape()[1])


@pytest.fixture
def session() -> Counting:
    return Counting()


def voice(prompt_tokens: int, seed: int = 0) -> Voice:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 9, prompt_tokens).astype(np.int32)
    return Voice(
        rng.normal(size=192).astype(np.float32), tokens, np.zeros((2 * prompt_tokens, MEL_BINS), np.float32)
    )


def feed(given: Voice) -> Feed:
    return given.feed(COSYVOICE2, reference=True)


def speak(flow: StreamingFlow, given: Voice, tokens: Sequence[int]) -> list[Array]:
    """Every chunk of a piece that the flow computes with its state."""
    chunks = GridChunks(COSYVOICE2, len(given.tokens), streamed=True)
    with flow.stream(feed(given)) as stream:
        made = []
        while call := chunks.next_call(len(tokens), ended=True):
            made.append(stream.mel(tokens, call))
        return made


def sums(given: Voice, tokens: Sequence[int]) -> Array:
    """The frames of all tokens, computed at once."""
    ids = np.concatenate([given.tokens, np.array(tokens)]).repeat(2)
    frames: Array = ids.cumsum()[2 * len(given.tokens) :].astype(np.float32)
    return frames


def ids(count: int) -> Iterator[int]:
    return iter(np.random.default_rng(1).integers(1, 9, count).tolist())


@pytest.mark.parametrize("prompt_tokens", [1, 24, 27, 28, 75, 130])
@pytest.mark.parametrize("count", [29, 150, 333])
def test_chunks_are_those_of_the_whole(session: Counting, prompt_tokens: int, count: int) -> None:
    given, tokens = voice(prompt_tokens), list(ids(count))
    made = speak(StreamingFlow(session, COSYVOICE2, PLENTY), given, tokens)
    np.testing.assert_array_equal(np.concatenate([mel[:, 0] for mel in made]), sums(given, tokens))


def test_each_frame_is_computed_once_and_the_prompts_blocks_once_for_all_streams(session: Counting) -> None:
    """Of 75 tokens, 50 are whole blocks that 3 more are known behind."""
    flow, tokens = StreamingFlow(session, COSYVOICE2, PLENTY), list(ids(200))
    speak(flow, voice(75), tokens)
    assert session.frames[0] == 100
    assert sum(session.frames) == 2 * (75 + 200)
    session.frames.clear()
    speak(flow, voice(75), tokens)
    assert sum(session.frames) == 2 * (75 + 200) - 100


def test_a_hit_changes_no_sample(session: Counting) -> None:
    flow, tokens = StreamingFlow(session, COSYVOICE2, PLENTY), list(ids(100))
    first, second = speak(flow, voice(75), tokens), speak(flow, voice(75), tokens)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["prompt_tokens", "prompt_mel", "speaker_embedding"])
def test_a_voice_that_differs_in_anything_is_another_one(session: Counting, name: str) -> None:
    flow, call = StreamingFlow(session, COSYVOICE2, PLENTY), FlowCall(0, 28, 25, True, False)
    given, tokens = feed(voice(75)), list(ids(28))
    for _ in range(2):
        flow.stream(given).mel(tokens, call)
    assert session.frames == [100, 100, 100]
    given[name] = given[name].copy()
    given[name].reshape(-1)[0] += 1
    flow.stream(given).mel(tokens, call)
    assert session.frames == [100, 100, 100, 100, 100]


def test_streams_side_by_side_do_not_mix(session: Counting) -> None:
    flow = StreamingFlow(session, COSYVOICE2, PLENTY)
    texts = [list(np.random.default_rng(seed).integers(1, 9, 150)) for seed in range(3)]
    chunks = [GridChunks(COSYVOICE2, 75, streamed=True) for _ in texts]
    streams = [flow.stream(feed(voice(75, seed))) for seed in range(3)]
    made: list[list[Array]] = [[], [], []]
    for _ in range(4):
        for parts, text, stream, grid in zip(made, texts, streams, chunks, strict=True):
            if call := grid.next_call(len(text), ended=True):
                mel = stream.mel(text, call)
                parts.append(mel[:, 0])
    for seed, (parts, text) in enumerate(zip(made, texts, strict=True)):
        np.testing.assert_array_equal(np.concatenate(parts), sums(voice(75, seed), text))


def test_without_memory_a_chunk_is_computed_from_the_beginning(session: Counting) -> None:
    """100 frames of prompt are kept for all streams and for this one, until a chunk needs their place."""
    flow, tokens = StreamingFlow(session, COSYVOICE2, 300 * FRAME_BYTES), list(ids(200))
    made = speak(flow, voice(75), tokens)
    assert session.frames == [100, 100, 100, 500, 550]
    np.testing.assert_array_equal(np.concatenate([mel[:, 0] for mel in made]), sums(voice(75), tokens))
    assert flow.reserve(300)  # it kept nothing that it could not use


def test_what_cannot_fit_drives_no_prompt_out(session: Counting) -> None:
    flow = StreamingFlow(session, COSYVOICE2, 310 * FRAME_BYTES)
    speak(flow, voice(75), list(ids(28)))
    assert not flow.reserve(311)
    session.frames.clear()
    speak(flow, voice(75), list(ids(28)))
    assert session.frames == [100, 6]


def test_a_stream_that_ends_gives_its_memory_back_and_prompts_make_way(session: Counting) -> None:
    flow = StreamingFlow(session, COSYVOICE2, 700 * FRAME_BYTES)
    for seed in range(20):
        session.frames.clear()
        speak(flow, voice(75, seed), list(ids(200)))
        assert sum(session.frames) == 2 * (75 + 200)


def test_a_failed_run_gives_its_memory_back(session: Counting) -> None:
    flow = StreamingFlow(session, COSYVOICE2, 700 * FRAME_BYTES)
    for _ in range(20):
        session.fail = True
        with pytest.raises(RuntimeError):
            speak(flow, voice(75), list(ids(200)))
        session.fail = False
        session.frames.clear()
        speak(flow, voice(75), list(ids(200)))
        assert sum(session.frames) <= 2 * (75 + 200)


def test_streams_that_begin_together_compute_their_prompt_once(session: Counting) -> None:
    flow, given = StreamingFlow(session, COSYVOICE2, 500 * FRAME_BYTES), feed(voice(75))

    def begin() -> None:
        with flow.stream(given) as stream:
            stream.mel([1] * 28, FlowCall(0, 28, 25, streaming=True, finalize=False))

    threads = [threading.Thread(target=begin) for _ in range(2)]
    with flow._turns.take(urgent=True):
        for thread in threads:
            thread.start()
        while len(flow._turns._waiting) < len(threads):  # neither has found the other's
            pass
    for thread in threads:
        thread.join(5)
    assert session.frames == [100, 100, 100]
    assert flow._left == 400 * FRAME_BYTES  # the prompt was paid for once
