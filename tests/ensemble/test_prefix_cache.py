"""What speakers' prompts begin with is computed once, and nobody hears a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_ensemble.generation import SpeechRequest
from cosytriton_ensemble.kv_cache import CAPACITY_STEP, MIB, CacheMemory, KeyValueCache
from cosytriton_ensemble.language_model import LanguageModel, OnnxModel
from cosytriton_ensemble.llm_spec import LanguageModelSpec, Prompt, TokenIds
from cosytriton_ensemble.prefix_cache import PrefixCache
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.sampling import FloatArray, RepetitionAwareSampler

SPEC = LanguageModelSpec(
    text_rows=50,
    text_encoder=False,
    speech_offset=50,
    speech_codes=60,
    speech_rows=63,
    sos_id=113,
    task_id=114,
    eos_id=60,
    fill_id=62,
    official_min_length_id=60,
    stop_ids=frozenset({60, 61, 62}),
    mix_ratio=(3, 7),
    layers=2,
    kv_heads=3,
    head_dim=4,
    sampler=RepetitionAwareSampler(),
)
POSITIONS = 5
LOGITS = np.arange(7, dtype=np.float32)
ENTRY = (
    POSITIONS * 2 * 2 * 3 * 4 * 4 + LOGITS.nbytes
)  # positions, layers, keys and values, heads, width, bytes


def filled(rows: int = 2) -> KeyValueCache:
    cache = KeyValueCache(SPEC, rows)
    cache.fit(20, rows)
    rng = np.random.default_rng(0)
    for buffer in cache.buffers.values():
        buffer[:] = rng.normal(size=buffer.shape)
    return cache


def test_what_was_kept_is_written_to_another_place() -> None:
    cache = filled()
    prefixes = PrefixCache(cache, ENTRY)
    wanted = cache.read(0, 3, 3 + POSITIONS)
    prefixes.keep(b"a", 0, 3, 3 + POSITIONS, LOGITS)
    for buffer in cache.buffers.values():
        buffer[0] = 0  # its row has left
    before = cache.read(1, 0, 10)
    logits = prefixes.restore(b"a", 1, 2)
    assert logits is not None
    np.testing.assert_array_equal(logits, LOGITS)
    for now, former, part in zip(cache.read(1, 0, 10), before, wanted, strict=True):
        np.testing.assert_array_equal(now[:, 2:7], part)
        np.testing.assert_array_equal(now[:, :2], former[:, :2])
        np.testing.assert_array_equal(now[:, 7:], former[:, 7:])


def test_whoever_takes_logits_may_change_them() -> None:
    """The engine rules tokens out in them."""
    prefixes = PrefixCache(filled(), ENTRY)
    prefixes.keep(b"a", 0, 0, POSITIONS, LOGITS)
    for _ in range(2):
        logits = prefixes.restore(b"a", 1, 0)
        assert logits is not None
        np.testing.assert_array_equal(logits, LOGITS)
        logits[:] = -np.inf


def test_the_bytes_are_bounded_and_what_is_asked_for_stays() -> None:
    prefixes = PrefixCache(filled(), 2 * ENTRY)
    for key in (b"a", b"b"):
        prefixes.keep(key, 0, 0, POSITIONS, LOGITS)
    assert prefixes.restore(b"a", 1, 0) is not None
    prefixes.keep(b"c", 0, 0, POSITIONS, LOGITS)
    assert [prefixes.restore(key, 1, 0) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    assert prefixes.nbytes == 2 * ENTRY
    prefixes.keep(b"d", 0, 0, 3 * POSITIONS, LOGITS)  # more than there is room for at all
    assert prefixes.restore(b"d", 1, 0) is None
    assert prefixes.nbytes == 2 * ENTRY


def test_a_prompt_is_divided_behind_what_is_shared() -> None:
    prompt = SPEC.prompt([4, 5, 6, 7, 8, 9], [1, 2, 3], transcript=3)
    chunks = prompt.chunks(3)
    assert [chunk.ids.tolist() for chunk in chunks] == [[113, 4, 5], [6], [7, 8, 9], [114, 51, 52], [53]]
    keys = [chunk.key for chunk in chunks]
    assert keys == [prompt.ids[:3].tobytes(), prompt.ids[:4].tobytes(), b"", b"", b""]
    assert len(SPEC.prompt([4, 5], []).chunks(128)) == 1


def test_embeddings_are_divided_with_their_ids() -> None:
    embeddings = np.arange(8, dtype=np.float32).reshape(4, 2)
    chunks = Prompt(np.array([1, -1, -1, 2], np.int32), embeddings).chunks(3)
    assert [len(chunk) for chunk in chunks] == [3, 1]
    np.testing.assert_array_equal(np.concatenate([chunk.embeddings for chunk in chunks]), embeddings)


# ---- in the language model ------------------------------------------------------------------------------


@pytest.fixture
def graph(tiny_repository: Path) -> Path:
    return version_directory(tiny_repository, "speech_lm") / FP32_GRAPH


def test_what_is_kept_of_a_prompt_changes_no_bit(graph: Path) -> None:
    """Whoever comes first computes the transcript; others find it, in other rows and behind other rows."""
    kept = LanguageModel.open(graph, threads=1)
    forgetful = LanguageModel.open(graph, threads=1, memory=CacheMemory(MIB, 0))
    for seed in range(3):
        text = [7, 8, 9, *np.random.default_rng(seed).integers(0, 300, 20 + 30 * seed).tolist()]
        chunks = kept.prompt_of(SpeechRequest(text, 3, [seed] * 5)).chunks(16)
        np.testing.assert_array_equal(kept.join(chunks[0]), forgetful.join(chunks[0]))
        for chunk in chunks[1:]:
            np.testing.assert_array_equal(kept.extend(seed, chunk), forgetful.extend(seed, chunk))
    ids = [40, 50, 60]
    np.testing.assert_array_equal(kept.step(ids), forgetful.step(ids))


def test_a_transcript_is_computed_once(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, computed = LanguageModel.open(graph, threads=1), list[int]()
    run = model.model.run

    def counted(rows: slice, ids: TokenIds, *rest: Any) -> FloatArray:
        computed.append(ids.size)
        return run(rows, ids, *rest)

    monkeypatch.setattr(model.model, "run", counted)
    for text, speech in (([1, 2, 3, 4], [5]), ([1, 2, 3, 9, 9], [6, 7]), ([1, 2, 8, 4], [5])):
        chunks = model.prompt_of(SpeechRequest(text, 3, speech)).chunks(128)
        assert len(chunks) == 2
        model.join(chunks[0])
        computed.append(0)
    assert computed == [4, 0, 0, 4, 0], "the third has another transcript"


def test_rows_of_the_longest_fit_into_the_memory(graph: Path) -> None:
    model = LanguageModel.open(graph, threads=1, memory=CacheMemory(MIB, 0))
    model.join(Prompt(np.zeros(1, np.int32)))
    assert isinstance(model.model, OnnxModel)
    row = sum(buffer[0].nbytes for buffer in model.model.cache.buffers.values())
    most = MIB * CAPACITY_STEP // row
    assert model.fits([most // 2, 1])
    assert not model.fits([most // 2 + 1, 1])
