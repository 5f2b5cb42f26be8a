"""What the language model is fed when it speaks: prompts, steps behind filled caches, and contexts.

The graph is driven as the engine drives it (`cosytriton_ensemble.llm_engine`): requests share each step. But
they join all at once and on this thread, so that equal requests give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cosytriton_engines.calibration.graphs import Keep, Tapped, open_graph
from cosytriton_ensemble.errors import CosytritonError
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.generation import FinishReason, Generation, Setting, SpeechRequest
from cosytriton_ensemble.kv_cache import KeyValueCache
from cosytriton_ensemble.language_model import LanguageModel, OnnxModel, TextEncoder
from cosytriton_ensemble.llm_spec import Prompt
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import text_encoder_of
from cosytriton_ensemble.sampling import FloatArray, seeded_uniform
from cosytriton_ensemble.spec import Array, Feed

TEXT_ENCODER = "text_encoder"

ROWS = 8  # requests that share a step, as many as are served
CONTEXTS = (0.2, 0.6)  # of the speech of each text: how much of it a context holds
# Steps that are kept, of one group of requests after the other: early and late ones, behind short caches and
# long ones. Few, since each position of a row takes 25 kB (v2, v3) or 115 kB (v1) at full size.
STEPS = ((1, 24, 96), (8, 48), (3, 40))
MAX_STEP_BYTES = 32 << 20  # of the caches of one step: as many of its rows are kept as fit, one at least


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """A request on its way, and what has become of it."""

    generation: Generation
    prompt: Prompt
    heard: Sequence[int]  # of the tokens, the speech ids that are spoken

    @property
    def tokens(self) -> Sequence[int]:
        """Every speech id that the model has made."""
        return self.generation.tokens

    @property
    def positions(self) -> int:
        """How many positions the row's cache holds: of the tokens, the last is yet to be fed."""
        return len(self.prompt) + len(self.tokens) - 1

    def context(self, share: float, speech_offset: int) -> Prompt:
        """The prompt and the first `share` of the speech, one token at least."""
        count = max(1, round(share * len(self.tokens)))
        speech = np.array(self.tokens[:count], np.int32) + speech_offset
        ids, embeddings = np.concatenate([self.prompt.ids, speech]), self.prompt.embeddings
        return Prompt(ids, None if embeddings is None else _padded(embeddings, len(ids)))


class SpeakingModel:
    """A language model that speaks, and keeps what its graphs are fed.

    Args:
        path: The exported graph; CosyVoice 1's text encoder lies beside it.
        family: The model's family.
        keep: Takes the feeds of speech_lm and of `TEXT_ENCODER`.

    Attributes:
        spec: What the graph says about itself.

    """

    def __init__(self, path: Path, family: Family, keep: Keep) -> None:
        pipeline, encoder = pipeline_of(family), path.with_name(text_encoder_of(path.name))
        embed = TextEncoder(Tapped(open_graph(encoder), TEXT_ENCODER, keep)) if encoder.exists() else None
        self._graph = OnnxModel(open_graph(path), ROWS)
        self._model = LanguageModel(self._graph, ROWS, pipeline.longest_sequence, embed)
        self.spec = self._model.spec
        self._setting = Setting(
            self.spec, family, pipeline.tokens.max, pipeline.longest_sequence, 0.0, lambda: None
        )
        self._name, self._keep = pipeline.speech_lm.name, keep

    def speak(self, requests: Sequence[SpeechRequest], kept_steps: Sequence[int]) -> list[Speech]:
        """Speak up to `ROWS` requests together and keep some of their steps, counted from 1."""
        speeches, active, step = [], list[Speech](), 0
        for request in requests:
            speech = self._begin(request)
            logits = self._model.join(speech.prompt)
            speeches.append(speech)
            active.append(speech)
            self._advance(active, len(active) - 1, logits)
        while active:
            step += 1
            if step in kept_steps:
                self._keep(self._name, self._step_feed(active))
            rows = self._model.step([speech.generation.last_id for speech in active])
            for row in reversed(range(len(active))):  # a row that leaves moves none that is still to come
                self._advance(active, row, rows[row])
        return speeches

    def prompt_of(self, request: SpeechRequest) -> Prompt:
        """Lay out what a request starts from."""
        return self._model.prompt_of(request)

    def keep_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Keep what rows are fed to start from, in one batch: the shorter ones are padded."""
        counts = [len(prompt) for prompt in prompts]
        cache = KeyValueCache(self.spec, len(prompts))
        cache.fit(max(counts), 0)
        ids = np.stack([_padded(prompt.ids, max(counts)) for prompt in prompts])
        given = [_padded(p.embeddings, max(counts)) for p in prompts if p.embeddings is not None]
        self._keep(self._name, _feed(ids, np.stack(given) if given else None, [0] * len(ids), counts, cache))

    def keep_contexts(self, speeches: Sequence[Speech]) -> None:
        """Keep prompts with beginnings of their speech, fed at once to an empty cache.

        The next token is told as in a step in the middle of the speech, but an empty cache takes no room.
        Contexts of two speeches alternate: those that calibrate and those that judge have none in common.
        """
        for start in range(0, len(speeches), 2):
            for share in CONTEXTS:
                for speech in speeches[start : start + 2]:
                    self.keep_prompts([speech.context(share, self.spec.speech_offset)])

    def _begin(self, request: SpeechRequest) -> Speech:
        listener = _Listener()
        generation = Generation(request, listener, seeded_uniform(request.seed), self._setting)
        return Speech(generation, generation.prompt(self._model), listener.heard)

    def _advance(self, active: list[Speech], row: int, logits: FloatArray) -> None:
        """Draw a row's next token; when its speech is over, the last row takes its place as in the model."""
        if active[row].generation.advance(logits) is not None:
            self._model.leave(row)
            active[row] = active[-1]
            active.pop()

    def _step_feed(self, active: Sequence[Speech]) -> Feed:
        """What the next step feeds to the first rows: one id behind the cache of each."""
        buffers = self._graph.cache.buffers
        row_bytes = sum(buffer[0].nbytes for buffer in buffers.values())
        taken = active[: max(1, MAX_STEP_BYTES // row_bytes)]
        counts = [speech.positions for speech in taken]
        cache = KeyValueCache(self.spec, len(taken))
        cache.fit(max(counts) + 1, 0)
        filled = min(cache.capacity, self._graph.cache.capacity)
        for name, buffer in cache.buffers.items():
            buffer[:, :, :filled] = buffers[name][: len(taken), :, :filled]
        ids = np.array([[speech.generation.last_id] for speech in taken], np.int32)
        width = taken[0].prompt.embeddings
        embeddings = None if width is None else np.zeros((len(taken), 1, width.shape[1]), np.float32)
        return _feed(ids, embeddings, counts, [1] * len(taken), cache)


class _Listener:
    """Collects the tokens that are spoken (`cosytriton_ensemble.generation.Listener`)."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def on_token(self, token: int) -> None:
        self.heard.append(token)

    def on_end(self, error: CosytritonError | None, reason: FinishReason | None) -> None:
        """Nothing to add."""

    def cancelled(self) -> bool:
        return False


def _feed(
    ids: Array, embeddings: Array | None, past: Sequence[int], new: Sequence[int], cache: KeyValueCache
) -> Feed:
    counts = {"past_counts": np.array(past, np.int32), "new_counts": np.array(new, np.int32)}
    given = {} if embeddings is None else {"embeddings": embeddings}
    return {"input_ids": ids, **given, **counts, **cache.buffers}


def _padded(array: Array, count: int) -> Array:
    """Rows of zeros behind an array [n, ...], up to `count`."""
    return np.pad(array, [(0, count - len(array)), *[(0, 0)] * (array.ndim - 1)])
