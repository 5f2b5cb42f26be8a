"""An encoded voice in a request: the checks that stand between a caller's tensors and the graphs."""

from __future__ import annotations

import numpy as np

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.pipeline import (
    COSYVOICE2,
    PROMPT_FRAME_COUNT,
    PROMPT_MEL,
    PROMPT_TOKEN_COUNT,
    PROMPT_TOKEN_IDS,
    SPEAKER,
)
from cosytriton_ensemble.spec import Feed


def used_prompt_count(feed: Feed) -> int:
    """Prompt tokens that have all their mel frames: the official front end drops the rest of both.

    Raises InputError when the voice's tensors contradict one another or hold what no encoder gives.
    """
    tokens, mel = feed[PROMPT_TOKEN_IDS.name], feed[PROMPT_MEL.name]
    token_count, frame_count = int(feed[PROMPT_TOKEN_COUNT.name][0]), int(feed[PROMPT_FRAME_COUNT.name][0])
    _check_count(PROMPT_TOKEN_COUNT.name, token_count, tokens.shape[0])
    _check_count(PROMPT_FRAME_COUNT.name, frame_count, mel.shape[0])
    valid = tokens[:token_count]
    if valid.min() < 0 or valid.max() >= COSYVOICE2.speech_codes:
        raise InputError(
            f"{PROMPT_TOKEN_IDS.name} holds the ids {valid.min()} to {valid.max()}; allowed are 0 to "
            f"{COSYVOICE2.speech_codes - 1}. Take what voice_encoder gives."
        )
    for name in (PROMPT_MEL.name, SPEAKER.name):
        if not np.isfinite(feed[name]).all():
            raise InputError(f"{name} holds NaN or infinite values. Take what voice_encoder gives.")
    return max(1, min(token_count, frame_count // COSYVOICE2.frames_per_token))


def _check_count(name: str, count: int, extent: int) -> None:
    if not 1 <= count <= extent:
        raise InputError(f"{name} is {count}; its tensor has room for 1 to {extent}.")
