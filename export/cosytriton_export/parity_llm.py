"""Parity of a language model's graphs with the PyTorch modules that they came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from cosytriton_ensemble.spec import Array, Feed, Size
from cosytriton_export.llm_base import LanguageModel
from cosytriton_export.llm_graph import TEXT_ENCODER, input_names, served
from cosytriton_export.llm_transformer import PromptEncoder, TransformerLM
from cosytriton_export.parity import BATCHES, SIZES, Errors, Feeds, Reference, measure

# New ids, positions before them, capacity of the cache.
_SIZES: Mapping[Size, tuple[int, int, int]] = {"min": (1, 0, 64), "opt": (100, 0, 128), "max": (3, 500, 512)}
_TEXT_TOKENS: Mapping[Size, int] = {"min": 1, "opt": 60, "max": 400}


def measure_llm(model: LanguageModel, path: Path, tolerance: float) -> Errors:
    """Run the graph at `path`, and CosyVoice 1's text encoder beside it, against their modules.

    Returns the larger error of both at each size. Raises `ExportError` like `measure`.
    """
    errors = measure(path, llm_reference(model), llm_feeds(model), tolerance)
    if isinstance(model, TransformerLM):
        beside, feeds = path.with_name(TEXT_ENCODER), text_encoder_feeds(model)
        others = measure(beside, text_encoder_reference(model), feeds, tolerance)
        errors = {place: max(error, others[place]) for place, error in errors.items()}
    return errors


def llm_reference(model: LanguageModel) -> Reference:
    """Wrap the language model behind the names of its graph."""
    module, names = served(model), input_names(model)
    caches = [_cache_names(kind, model) for kind in ("key", "value")]

    def run(feed: Feed) -> list[Array]:
        inputs = (torch.from_numpy(feed[name]) for name in names)
        copies = ([torch.from_numpy(feed[name].copy()) for name in group] for group in caches)
        with torch.no_grad():
            logits, keys, values = module(*inputs, *copies)
        return [output.numpy() for output in (logits, *keys, *values)]

    return run


def llm_feeds(model: LanguageModel) -> Feeds:
    """Sample a prompt, a longer prompt and a few ids behind a filled cache, each for 1 and more rows."""
    return {(size, batch): _llm_feed(model, size, batch) for size in SIZES for batch in BATCHES}


def _llm_feed(model: LanguageModel, size: Size, batch: int) -> Feed:
    rng = np.random.default_rng(0)
    new, past, capacity = _SIZES[size]
    rows = len(model.embedding_table())
    counts = rng.integers(1, new + 1, batch).astype(np.int32)
    counts[0] = new
    feed: Feed = {
        "input_ids": rng.integers(0, rows, (batch, new)).astype(np.int32),
        "past_counts": rng.integers(past // 2, past + 1, batch).astype(np.int32),
        "new_counts": counts,
    }
    if isinstance(model, TransformerLM):
        feed["input_ids"][:, 1::2] = -1
        feed["embeddings"] = rng.standard_normal((batch, new, model.width), np.float32)
    shape = (batch, model.cache.heads, capacity, model.cache.head_dim)
    names = (name for kind in ("key", "value") for name in _cache_names(kind, model))
    return feed | {name: rng.standard_normal(shape, np.float32) for name in names}


def _cache_names(kind: str, model: LanguageModel) -> list[str]:
    return [f"{kind}_cache.{layer}" for layer in range(model.cache.layers)]


def text_encoder_reference(model: TransformerLM) -> Reference:
    """Wrap the encoder of text and speaker: feed -> outputs, as arrays."""
    encode = PromptEncoder(model).eval()

    def run(feed: Feed) -> list[Array]:
        inputs = (torch.from_numpy(feed[name]) for name in ("text_ids", "speaker_embedding"))
        with torch.no_grad():
            return [output.numpy() for output in encode(*inputs)]

    return run


def text_encoder_feeds(model: TransformerLM) -> Feeds:
    """Sample texts of one token to the longest, each for 1 and more rows."""
    rng = np.random.default_rng(0)
    return {
        (size, batch): {
            "text_ids": rng.integers(0, model.ids.text_rows, (batch, tokens)).astype(np.int32),
            "speaker_embedding": rng.standard_normal((batch, model.speaker_width), np.float32),
        }
        for size, tokens in _TEXT_TOKENS.items()
        for batch in BATCHES
    }
