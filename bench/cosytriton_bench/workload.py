"""What is measured: the sizes of a request, from which every stage's shapes follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.pipeline import ANALYSIS_RATE, MEL_BINS, SPEAKER_SIZE
from cosytriton_ensemble.spec import Feed

TEXT_TOKENS = 25  # transcript of 3 s and text of 5 s of English
MARKS = 2  # of the language model's prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """A request, and how thoroughly it is measured.

    Attributes:
        family: of the checkpoint.
        prompt_seconds, speech_seconds: of the reference, and of the speech that is made.
        rounds: how often each variant is measured, in turn with the others.
        threads: of PyTorch and of each session of ONNX Runtime; 0 takes every core.
        quick: small batches and short runs, to see that everything works.

    """

    family: Family
    prompt_seconds: float = 3
    speech_seconds: float = 5
    rounds: int = 3
    threads: int = 0
    quick: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Speech tokens of the reference."""
        return round(self.prompt_seconds * self.family.token_rate)

    @property
    def tokens(self) -> int:
        """Speech tokens that are made."""
        return round(self.speech_seconds * self.family.token_rate)

    @property
    def prompt_positions(self) -> int:
        """Positions of the language model before the first token."""
        return MARKS + TEXT_TOKENS + self.prompt_tokens

    @property
    def batches(self) -> tuple[int, ...]:
        """Rows of the language model that are decoded together."""
        return (1, 2) if self.quick else (1, 2, 4, 8, 16)

    @property
    def stage_batches(self) -> tuple[int, ...]:
        """Rows of the native stages that are run together."""
        return (2,) if self.quick else (2, 4, 8)

    def short(self) -> Workload:
        """A short request, to see what batching brings."""
        return replace(self, prompt_seconds=0.6, speech_seconds=0.6)

    def encoder_feed(self, rate: int, waveform: str, count: str, rows: int = 1) -> Feed:
        """A reference for one of the encoders."""
        samples = round(self.prompt_seconds * rate)
        return {
            waveform: _noise((rows, samples), 0.1),
            count: np.full((rows, 1), samples, np.int32),
        }

    def feed(self, stage: str, rows: int = 1) -> Feed:
        """Inputs of a native stage for whole speech."""
        if stage == "prompt_mel":
            rate, names_ = self.family.sample_rate, (names.WAVEFORM_MODEL, names.SAMPLE_COUNT_MODEL)
            return self.encoder_feed(rate, *names_, rows)
        if stage in ("speaker_embedding", "audio_tokenizer"):
            return self.encoder_feed(ANALYSIS_RATE, names.WAVEFORM_16K, names.SAMPLE_COUNT_16K, rows)
        if stage == "flow":
            return self.flow_feed(self.tokens, rows=rows)
        return self.vocoder_feed(self.family.frames(self.tokens), rows)

    def flow_feed(
        self, tokens: int, *, rows: int = 1, streaming: bool = False, finalize: bool = True
    ) -> Feed:
        """Inputs of the flow for `tokens` behind the reference."""
        rng, prompt = np.random.default_rng(0), self.prompt_tokens

        def ids(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
            return rng.integers(0, self.family.speech_codes, (rows, count)).astype(np.int32)

        return {
            names.TOKENS: ids(tokens),
            names.TOKEN_COUNT: np.full((rows, 1), tokens, np.int32),
            names.PROMPT_TOKENS: ids(prompt),
            names.PROMPT_TOKEN_COUNT: np.full((rows, 1), prompt, np.int32),
            names.PROMPT_MEL: _noise((rows, self.family.frames(prompt), MEL_BINS), 0.3),
            names.SPEAKER_EMBEDDING: _noise((rows, SPEAKER_SIZE), 1),
            names.STREAMING: np.full((rows, 1), streaming),
            names.FINALIZE: np.full((rows, 1), finalize),
        }

    def vocoder_feed(self, frames: int, rows: int = 1) -> Feed:
        """Inputs of the vocoder for `frames` in one piece."""
        heard = {
            names.MEL: _noise((rows, frames, MEL_BINS), 1) - 6,  # the level of log-mel speech
            names.FRAME_COUNT: np.full((rows, 1), frames, np.int32),
        }
        if self.family.overlap_samples:
            heard |= {
                names.SOURCE_CACHE: np.zeros((rows, self.family.overlap_samples), np.float32),
                names.SOURCE_CACHE_COUNT: np.zeros((rows, 1), np.int32),
            }
        else:
            heard |= {names.FINALIZE: np.full((rows, 1), True)}
        return heard | {
            names.NOISE_OFFSET: np.zeros((rows, 1), np.int32),
            names.PHASE: np.zeros((rows, 1), np.float32),
            names.PHASE_FRAME: np.full((rows, 1), -1, np.int32),
        }


def _noise(shape: tuple[int, ...], scale: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(0, scale, shape).astype(np.float32)
