"""The pipeline: every stage and ensemble of the model repository, declared once.

Sizes that differ between model families hang on `Family`; the shapes of one checkpoint (vocabulary,
widths) are read from the checkpoint and never stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cosytriton_ensemble.spec import Dim, Ensemble, Stage, Step, Tensor


@dataclass(frozen=True, slots=True)
class Family:
    """The rates and sizes that all checkpoints of one CosyVoice family share."""

    name: str
    sample_rate: int  # Hz of the spoken audio
    mel_hop: int  # samples per mel frame
    frames_per_token: int  # mel frames per speech token
    lookahead: int  # speech tokens that a non-final chunk needs beyond its end
    hop_tokens: int  # speech tokens of the first streamed chunk, and the grid of the block mask
    max_hop_tokens: int  # speech tokens that a streamed chunk grows to
    overlap_frames: int  # mel frames that two vocoder chunks share
    speech_codes: int  # size of the speech codebook

    @property
    def samples_per_token(self) -> int:
        """Audio samples per speech token."""
        return self.mel_hop * self.frames_per_token

    @property
    def token_rate(self) -> float:
        """Speech tokens per second."""
        return self.sample_rate / self.samples_per_token

    @property
    def overlap_samples(self) -> int:
        """Audio samples that two vocoder chunks share."""
        return self.overlap_frames * self.mel_hop


COSYVOICE2 = Family(
    name="cosyvoice2",
    sample_rate=24_000,
    mel_hop=480,
    frames_per_token=2,
    lookahead=3,
    hop_tokens=25,
    max_hop_tokens=100,
    overlap_frames=8,
    speech_codes=6561,  # 3^8, finite scalar quantisation
)

ANALYSIS_RATE = 16_000  # Hz, of the audio that the speaker and token encoders hear
MEL_BINS = 80
SPEAKER_SIZE = 192  # width of a speaker embedding
MAX_REFERENCE_SECONDS = 30  # the official front end refuses longer references
MAX_SPEECH_SECONDS = 60  # one request; the fixed noise of the flow would allow 300
MAX_TEXT_TOKENS = 150  # one request: about 45 s of speech

_F = COSYVOICE2
_TOKENS_PER_SECOND = int(_F.token_rate)

# ---- dimensions -------------------------------------------------------------------------------------
# The padding grid of a reference is one second, that of speech one hop of the stream.
SAMPLES_16K = Dim(
    "samples_16k", 4_000, 5 * ANALYSIS_RATE, MAX_REFERENCE_SECONDS * ANALYSIS_RATE, ANALYSIS_RATE
)
SAMPLES_24K = Dim(
    "samples_24k", 6_000, 5 * _F.sample_rate, MAX_REFERENCE_SECONDS * _F.sample_rate, _F.sample_rate
)
PROMPT_TOKENS = Dim("prompt_tokens", 1, 125, MAX_REFERENCE_SECONDS * _TOKENS_PER_SECOND, _F.hop_tokens)
PROMPT_FRAMES = PROMPT_TOKENS.times(_F.frames_per_token, "prompt_frames")
TOKENS = Dim("tokens", 1 + _F.lookahead, 125, MAX_SPEECH_SECONDS * _TOKENS_PER_SECOND, _F.hop_tokens)
FRAMES = TOKENS.times(_F.frames_per_token, "frames")
SAMPLES = FRAMES.times(_F.mel_hop, "samples")
REFERENCE = Dim("reference", 4_000, 5 * ANALYSIS_RATE, MAX_REFERENCE_SECONDS * 192_000)
TEXT = Dim("text", 1, 40, 2 * MAX_TEXT_TOKENS)

# ---- tensors that several stages share --------------------------------------------------------------
WAVEFORM_16K = Tensor("waveform_16k", "FP32", (SAMPLES_16K,))
COUNT_16K = Tensor("sample_count_16k", "INT32", (1,), counts=SAMPLES_16K)
WAVEFORM_24K = Tensor("waveform_24k", "FP32", (SAMPLES_24K,))
COUNT_24K = Tensor("sample_count_24k", "INT32", (1,), counts=SAMPLES_24K)
SPEAKER = Tensor("speaker_embedding", "FP32", (SPEAKER_SIZE,))
PROMPT_TOKEN_IDS = Tensor("prompt_tokens", "INT32", (PROMPT_TOKENS,), high=_F.speech_codes)
PROMPT_TOKEN_COUNT = Tensor("prompt_token_count", "INT32", (1,), counts=PROMPT_TOKENS)
PROMPT_MEL = Tensor("prompt_mel", "FP32", (PROMPT_FRAMES, MEL_BINS))
PROMPT_FRAME_COUNT = Tensor("prompt_frame_count", "INT32", (1,), counts=PROMPT_FRAMES)
TOKEN_IDS = Tensor("tokens", "INT32", (TOKENS,), high=_F.speech_codes)
TOKEN_COUNT = Tensor("token_count", "INT32", (1,), counts=TOKENS)
STREAMING = Tensor("streaming", "BOOL", (1,))
FINALIZE = Tensor("finalize", "BOOL", (1,))
MEL = Tensor("mel", "FP32", (FRAMES, MEL_BINS))
FRAME_COUNT = Tensor("frame_count", "INT32", (1,), counts=FRAMES)
SOURCE_CACHE = Tensor("source_cache", "FP32", (_F.overlap_samples,))
SOURCE_CACHE_COUNT = Tensor("source_cache_count", "INT32", (1,), high=_F.overlap_samples)
NOISE_OFFSET = Tensor("noise_offset", "INT32", (1,), high=100_000)
WAVEFORM = Tensor("waveform", "FP32", (SAMPLES,))
SAMPLE_COUNT = Tensor("sample_count", "INT32", (1,), counts=SAMPLES)
SOURCE = Tensor("source", "FP32", (SAMPLES,))

# ---- native stages ----------------------------------------------------------------------------------
SPEAKER_EMBEDDING = Stage(
    "speaker_embedding",
    (WAVEFORM_16K, COUNT_16K),
    (SPEAKER,),
    max_batch=8,
    queue_delay_us=2_000,
    cached=True,
)
AUDIO_TOKENIZER = Stage(
    "audio_tokenizer",
    (WAVEFORM_16K, COUNT_16K),
    (PROMPT_TOKEN_IDS, PROMPT_TOKEN_COUNT),
    max_batch=8,
    queue_delay_us=2_000,
    cached=True,
    tolerance=0,  # token ids are equal or wrong
)
PROMPT_MEL_STAGE = Stage(
    "prompt_mel",
    (WAVEFORM_24K, COUNT_24K),
    (PROMPT_MEL, PROMPT_FRAME_COUNT),
    max_batch=8,
    queue_delay_us=2_000,
    cached=True,
)
FLOW = Stage(
    "flow",
    (
        TOKEN_IDS,
        TOKEN_COUNT,
        PROMPT_TOKEN_IDS,
        PROMPT_TOKEN_COUNT,
        PROMPT_MEL,
        SPEAKER,
        STREAMING,
        FINALIZE,
    ),
    (MEL, FRAME_COUNT),
    max_batch=8,
    queue_delay_us=2_000,
)
VOCODER = Stage(
    "vocoder",
    (MEL, FRAME_COUNT, SOURCE_CACHE, SOURCE_CACHE_COUNT, NOISE_OFFSET),
    (WAVEFORM, SOURCE, SAMPLE_COUNT),
    max_batch=8,
    queue_delay_us=2_000,
    tolerance=1e-3,
    # Both keep what every new batch and length takes: 24 % more memory after 400 requests.
    parameters=(("enable_mem_arena", 0), ("enable_mem_pattern", 0)),
)

# ---- Python models ----------------------------------------------------------------------------------
AUDIO = Tensor("audio", "FP32", (REFERENCE,))
SAMPLE_RATE = Tensor("sample_rate", "INT32", (1,))
TEXT_INPUT = Tensor("text", "BYTES", (1,))
PROMPT_TEXT = Tensor("prompt_text", "BYTES", (1,))
TEXT_TOKENS = Tensor("text_tokens", "INT32", (TEXT,))  # transcript ++ text
PROMPT_TEXT_COUNT = Tensor("prompt_text_count", "INT32", (1,))  # how many of them are the transcript's
SEED = Tensor("seed", "INT64", (1,), optional=True)
MAX_TOKENS = Tensor("max_tokens", "INT32", (1,), optional=True)
USED_PROMPT_COUNT = Tensor("used_prompt_count", "INT32", (1,))  # prompt tokens that have their mel frames

AUDIO_FRONTEND = Stage(
    "audio_frontend",
    (AUDIO, SAMPLE_RATE),
    (WAVEFORM_16K, COUNT_16K, WAVEFORM_24K, COUNT_24K),
    backend="python",
)
TEXT_FRONTEND = Stage(
    "text_frontend", (TEXT_INPUT, PROMPT_TEXT), (TEXT_TOKENS, PROMPT_TEXT_COUNT), backend="python"
)
_LM_PROMPT = (TEXT_TOKENS, PROMPT_TEXT_COUNT, PROMPT_TOKEN_IDS, PROMPT_TOKEN_COUNT)
SPEECH_LM = Stage(
    "speech_lm",
    (*_LM_PROMPT, SEED, MAX_TOKENS),
    (TOKEN_IDS,),
    backend="python",
    decoupled=True,
    parameters=(
        ("slots", 8),  # requests that share each step
        ("max_waiting", 64),  # requests beyond them; more are refused as UNAVAILABLE
        ("intra_op_thread_count", 0),  # 0: every core
    ),
)
VOICE = (PROMPT_TOKEN_IDS, PROMPT_TOKEN_COUNT, PROMPT_MEL, PROMPT_FRAME_COUNT, SPEAKER)
"""An encoded voice: what `voice_encoder` gives and `tts` takes."""

SPEECH_TOKENS = Stage(
    "speech_tokens",
    (TEXT_TOKENS, PROMPT_TEXT_COUNT, *VOICE, SEED, MAX_TOKENS),
    (
        TOKEN_IDS,
        TOKEN_COUNT,
        USED_PROMPT_COUNT,
        STREAMING,
        FINALIZE,
        SOURCE_CACHE,
        SOURCE_CACHE_COUNT,
        NOISE_OFFSET,
    ),
    backend="python",
)
TTS_STREAM = Stage(
    "tts_stream",
    (TEXT_INPUT, PROMPT_TEXT, *VOICE, SEED, MAX_TOKENS),
    (WAVEFORM, SAMPLE_COUNT, TOKEN_COUNT),
    backend="python",
    decoupled=True,
)


# ---- ensembles --------------------------------------------------------------------------------------
def _step(
    stage: Stage, renamed: Mapping[str, str] = MappingProxyType({}), unused: tuple[Tensor, ...] = ()
) -> Step:
    """A step whose tensors keep their names, but for inputs `renamed` {model name: ensemble name}."""
    inputs = {t.name: renamed.get(t.name, t.name) for t in stage.inputs}
    return Step(stage, inputs, {t.name: t.name for t in stage.outputs if t not in unused})


VOICE_ENCODER = Ensemble(
    "voice_encoder",
    (AUDIO, SAMPLE_RATE),
    VOICE,
    (_step(AUDIO_FRONTEND), _step(SPEAKER_EMBEDDING), _step(AUDIO_TOKENIZER), _step(PROMPT_MEL_STAGE)),
)
TTS = Ensemble(
    "tts",
    (TEXT_INPUT, PROMPT_TEXT, *VOICE, SEED, MAX_TOKENS),
    (WAVEFORM, SAMPLE_COUNT, TOKEN_COUNT),
    (
        _step(TEXT_FRONTEND),
        _step(SPEECH_TOKENS),
        _step(FLOW, {PROMPT_TOKEN_COUNT.name: USED_PROMPT_COUNT.name}),
        _step(VOCODER, unused=(SOURCE,)),
    ),
)

NATIVE_STAGES = (SPEAKER_EMBEDDING, AUDIO_TOKENIZER, PROMPT_MEL_STAGE, FLOW, VOCODER)
PYTHON_STAGES = (AUDIO_FRONTEND, TEXT_FRONTEND, SPEECH_LM, SPEECH_TOKENS, TTS_STREAM)
ENSEMBLES = (VOICE_ENCODER, TTS)
