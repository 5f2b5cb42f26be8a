"""The pipeline of a model family: every stage and ensemble of its model repository, declared once.

What is served has the same names in every family; shapes and rates come from `Family`, and the flow and the
vocoder take what their family's algorithm carries from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cosytriton_ensemble import names
from cosytriton_ensemble.families import FAMILIES, Family
from cosytriton_ensemble.spec import Dim, Ensemble, Stage, Step, Tensor

ANALYSIS_RATE = 16_000  # Hz, of the audio that the speaker and token encoders hear
MEL_BINS = 80
SPEAKER_SIZE = 192  # width of a speaker embedding
MAX_REFERENCE_SECONDS = 30  # the official front end refuses longer references
MAX_SPEECH_SECONDS = 60  # one piece of a text; the fixed noise of the flow would allow 300
MAX_TEXT_TOKENS = 150  # one piece of a text: about 45 s of speech
MAX_CHARACTERS = 100_000  # one request, several hours of speech in pieces
MIN_SPEED, MAX_SPEED = 0.5, 2.0
FLOW_STATE_MIB = 1024  # that all streams may keep of the flow's state; what is beyond is computed again
MAX_ANSWER_SECONDS = 600  # of speech in one answer; a stream has no end

# ONNX Runtime keeps a pattern of memory for every shape that it has met.
NO_PATTERN = (("enable_mem_pattern", 0),)

MAX_POSITIONS = 4096  # of the language model; the table of distances of v1 ends there
_MARKS = 3  # of the language model's prompt: start, v1's speaker, and the one between text and speech

# ---- tensors without a family's shape -----------------------------------------------------------------
SAMPLES_16K = Dim(
    "samples_16k", 4_000, 5 * ANALYSIS_RATE, MAX_REFERENCE_SECONDS * ANALYSIS_RATE, ANALYSIS_RATE
)
REFERENCE = Dim("reference", 4_000, 5 * ANALYSIS_RATE, MAX_REFERENCE_SECONDS * 192_000)
TEXT = Dim("text", 1, 40, 2 * MAX_TEXT_TOKENS)
TEXTS = Dim("texts", 1, 400, 4 * MAX_CHARACTERS)
PIECES = Dim("pieces", 1, 4, MAX_CHARACTERS)

WAVEFORM_16K = Tensor(names.WAVEFORM_16K, "FP32", (SAMPLES_16K,))
COUNT_16K = Tensor(names.SAMPLE_COUNT_16K, "INT32", (1,), counts=SAMPLES_16K)
AUDIO = Tensor(names.AUDIO, "FP32", (REFERENCE,))
SAMPLE_RATE = Tensor(names.SAMPLE_RATE, "INT32", (1,))
SPEAKER = Tensor(names.SPEAKER_EMBEDDING, "FP32", (SPEAKER_SIZE,))
CHECKPOINT = Tensor(names.CHECKPOINT, "BYTES", (1,))
FINALIZE = Tensor(names.FINALIZE, "BOOL", (1,))


def _optional(tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.dtype, tensor.dims, tensor.counts, tensor.high, optional=True)


def _option(name: str, dtype: str) -> Tensor:
    return Tensor(name, dtype, (1,), optional=True)  # type: ignore[arg-type]


WORDS = tuple(
    _option(name, "BYTES") for name in (names.TEXT, names.PROMPT_TEXT, names.INSTRUCT_TEXT, names.MODE)
)
TEXT_OPTIONS = (_option(names.NORMALISE, "BOOL"), _option(names.KEEP_MARKUP, "BOOL"))
LIMITS = (_option(names.SEED, "INT64"), _option(names.MAX_TOKENS, "INT32"), _option(names.OFFICIAL, "BOOL"))
TEXT_STREAM = (_option(names.TEXT_STREAM, "BYTES"), _option(names.TEXT_END, "BOOL"))


class Pipeline:
    """The declarations of one family.

    Attributes:
        tokens, frames, samples: dimensions of the speech of one piece of text.
        prompt_tokens, prompt_frames: dimensions of a reference.
        speaker_embedding, audio_tokenizer, prompt_mel, flow, vocoder: native stages.
        audio_frontend, text_frontend, speech_lm, tts, tts_stream: Python models.
        graph_stages: those with an exported graph, native or not.
        voice_encoder: the ensemble that encodes a reference.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._dimensions(family)
        self._encoders(family)
        self.flow, self.vocoder = self._make_flow(family), self._make_vocoder(family)
        self.text_frontend, self.speech_lm = self._make_text_frontend(family), self._make_speech_lm(family)
        self.tts, self.tts_stream = (self._make_tts(family, streamed) for streamed in (False, True))
        self.native_stages = (
            self.speaker_embedding,
            self.audio_tokenizer,
            self.prompt_mel,
            self.flow,
            self.vocoder,
        )
        self.python_stages = (
            self.audio_frontend,
            self.text_frontend,
            self.speech_lm,
            self.tts,
            self.tts_stream,
        )
        self.ensembles = (self.voice_encoder,)
        stages = (*self.native_stages, *self.python_stages)
        self.graph_stages = tuple(stage for stage in stages if stage.has_graph)

    @property
    def longest_prompt(self) -> int:
        """Positions of the language model's longest prompt."""
        return TEXT.max + self.prompt_tokens.max + _MARKS

    @property
    def longest_sequence(self) -> int:
        """Positions of the longest prompt and its speech; rows of a cache stay aligned."""
        return min(-(-(self.longest_prompt + self.tokens.max) // 64) * 64, MAX_POSITIONS)

    def _dimensions(self, family: Family) -> None:
        """The padding grid of a reference is one second, that of speech about one hop of the stream."""
        rate, token_rate = family.sample_rate, family.token_rate
        seconds = MAX_REFERENCE_SECONDS
        self.samples_model = Dim("samples_model", -(-rate // 4), 5 * rate, seconds * rate, rate)
        self.prompt_tokens = Dim("prompt_tokens", 1, 5 * token_rate, seconds * token_rate, token_rate)
        lookahead = 0 if family.fade_frames else family.lookahead
        grid = family.lookahead if family.fade_frames else family.hop_tokens
        longest = MAX_SPEECH_SECONDS * token_rate
        self.tokens = Dim("tokens", 1 + lookahead, 5 * token_rate, longest, grid)
        ratio = family.sample_rate / (family.token_rate * family.mel_hop)
        if ratio.is_integer():
            self.prompt_frames = self.prompt_tokens.times(int(ratio), "prompt_frames")
            self.frames = self.tokens.times(int(ratio), "frames")
        else:
            second = family.frames(token_rate) + 1
            self.prompt_frames = Dim("prompt_frames", 1, 5 * second, seconds * second, second)
            self.frames = Dim("frames", 1, 5 * second, family.frames(longest), family.fade_frames)
        self.samples = self.frames.times(family.mel_hop, "samples")

    def _encoders(self, family: Family) -> None:
        waveform_model = Tensor(names.WAVEFORM_MODEL, "FP32", (self.samples_model,))
        count_model = Tensor(names.SAMPLE_COUNT_MODEL, "INT32", (1,), counts=self.samples_model)
        prompt_ids = Tensor(names.PROMPT_TOKENS, "INT32", (self.prompt_tokens,), high=family.speech_codes)
        prompt_count = Tensor(names.PROMPT_TOKEN_COUNT, "INT32", (1,), counts=self.prompt_tokens)
        prompt_mel = Tensor(names.PROMPT_MEL, "FP32", (self.prompt_frames, MEL_BINS))
        frame_count = Tensor(names.PROMPT_FRAME_COUNT, "INT32", (1,), counts=self.prompt_frames)
        self.prompt = (prompt_ids, prompt_count, prompt_mel, frame_count)
        self.voice = (*self.prompt, SPEAKER, CHECKPOINT)
        self.speaker_embedding = _encoder("speaker_embedding", (WAVEFORM_16K, COUNT_16K), (SPEAKER,))
        self.audio_tokenizer = _encoder(
            "audio_tokenizer",
            (WAVEFORM_16K, COUNT_16K),
            (prompt_ids, prompt_count),
            tolerance=0,  # token ids are equal or wrong
        )
        self.prompt_mel = _encoder(
            "prompt_mel", (waveform_model, count_model), (prompt_mel, frame_count), learned=False
        )
        self.audio_frontend = Stage(
            "audio_frontend",
            (AUDIO, SAMPLE_RATE),
            (WAVEFORM_16K, COUNT_16K, waveform_model, count_model, CHECKPOINT),
            backend="python",
            parameters=(("family", family.name),),
        )
        steps = (self.audio_frontend, self.speaker_embedding, self.audio_tokenizer, self.prompt_mel)
        self.voice_encoder = Ensemble(
            "voice_encoder", (AUDIO, SAMPLE_RATE), self.voice, tuple(_step(stage) for stage in steps)
        )

    def _make_flow(self, family: Family) -> Stage:
        mel = Tensor(names.MEL, "FP32", (self.frames, MEL_BINS))
        frame_count = Tensor(names.FRAME_COUNT, "INT32", (1,), counts=self.frames)
        said = (
            Tensor(names.TOKENS, "INT32", (self.tokens,), high=family.speech_codes),
            Tensor(names.TOKEN_COUNT, "INT32", (1,), counts=self.tokens),
            *self.prompt[:3],
        )
        if not family.fade_frames:
            masked = (*said, SPEAKER, Tensor(names.STREAMING, "BOOL", (1,)), FINALIZE)
            outputs: tuple[Tensor, ...] = (mel, frame_count)
            return Stage("flow", masked, outputs, max_batch=8, queue_delay_us=2_000, parameters=NO_PATTERN)
        prompt = self.prompt_frames
        small, usual, large = (d + family.fade_frames for d in (1, prompt.opt, prompt.max))
        cache, cache_out = (Dim(name, small, usual, large) for name in ("cache_frames", "cache_out_frames"))
        carried = (
            Tensor(names.NOISE_OFFSET, "INT32", (1,), high=self.frames.max),
            Tensor(names.MU_CACHE, "FP32", (cache, MEL_BINS)),
            Tensor(names.MU_CACHE_COUNT, "INT32", (1,), counts=cache),
        )
        outputs = (mel, frame_count, Tensor(names.MU_CACHE_OUT, "FP32", (cache_out, MEL_BINS)))
        inputs = (*said, self.prompt[3], SPEAKER, *carried)
        return Stage("flow", inputs, outputs, max_batch=8, queue_delay_us=2_000, parameters=NO_PATTERN)

    def _make_vocoder(self, family: Family) -> Stage:
        heard = (
            Tensor(names.MEL, "FP32", (self.frames, MEL_BINS)),
            Tensor(names.FRAME_COUNT, "INT32", (1,), counts=self.frames),
        )
        waveform = Tensor(names.WAVEFORM, "FP32", (self.samples,))
        sample_count = Tensor(names.SAMPLE_COUNT, "INT32", (1,), counts=self.samples)
        carried = (
            Tensor(names.NOISE_OFFSET, "INT32", (1,), high=100_000),
            Tensor(names.PHASE, "FP32", (1,)),
            Tensor(names.PHASE_FRAME, "INT32", (1,), high=family.overlap_frames or family.context_frames),
        )
        phase_out = Tensor(names.PHASE_OUT, "FP32", (1,))
        inputs: tuple[Tensor, ...] = (*heard, FINALIZE, *carried)
        outputs: tuple[Tensor, ...] = (waveform, sample_count, phase_out)
        if overlap := family.overlap_samples:
            cache = Tensor(names.SOURCE_CACHE, "FP32", (overlap,))
            cache_count = Tensor(names.SOURCE_CACHE_COUNT, "INT32", (1,), high=overlap)
            inputs = (*heard, cache, cache_count, *carried)
            source = Tensor(names.SOURCE, "FP32", (self.samples,))
            outputs = (waveform, source, sample_count, phase_out)
        return Stage(
            "vocoder",
            inputs,
            outputs,
            max_batch=8,
            queue_delay_us=2_000,
            tolerance=1e-3,
            # Both keep what every new batch and length takes: 24 % more memory after 400 requests.
            parameters=(("enable_mem_arena", 0), ("enable_mem_pattern", 0)),
        )

    def _make_text_frontend(self, family: Family) -> Stage:
        return Stage(
            "text_frontend",
            (*WORDS[:2], *TEXT_OPTIONS),
            (
                Tensor(names.TEXT_TOKENS, "INT32", (TEXTS,)),  # of the prompt, then of each piece
                Tensor(names.PROMPT_TEXT_COUNT, "INT32", (1,)),
                Tensor(names.PIECE_COUNTS, "INT32", (PIECES,)),
            ),
            backend="python",
            parameters=(("family", family.name), ("max_characters", MAX_CHARACTERS)),
        )

    def _make_speech_lm(self, family: Family) -> Stage:
        return Stage(
            "speech_lm",
            (
                _optional(Tensor(names.TEXT_TOKENS, "INT32", (TEXT,))),
                _option(names.PROMPT_TEXT_COUNT, "INT32"),
                _option(names.PREFIX_COUNT, "INT32"),
                *(_optional(t) for t in self.prompt[:2]),
                _optional(SPEAKER),
                *LIMITS,
                *TEXT_STREAM,
            ),
            (Tensor(names.TOKENS, "INT32", (self.tokens,)), Tensor(names.FINISH_REASON, "BYTES", (1,))),
            backend="python",
            decoupled=True,
            own_graph=True,
            parameters=(
                ("family", family.name),
                ("slots", 8),  # requests that share each step
                ("max_waiting", 64),  # requests beyond them; more are refused as UNAVAILABLE
                ("chunk", 128),  # positions of a prompt that are fed between two steps
                (
                    "cache_mib",
                    1024 if family.fade_frames else 512,
                ),  # keys and values of those requests; further ones wait
                ("prefix_mib", 32),  # keys and values of what prompts begin with
                ("intra_op_thread_count", 0),  # 0: every core
                ("text_timeout", 30),  # seconds that a request waits for the next piece of its text
            ),
        )

    def _make_tts(self, family: Family, streamed: bool) -> Stage:
        request = (
            *WORDS,
            _option(names.VOICE_NAME, "BYTES"),
            *(_optional(t) for t in self.voice),
            _optional(Tensor(names.SOURCE_TOKENS, "INT32", (self.prompt_tokens,))),
            _option(names.SOURCE_TOKEN_COUNT, "INT32"),
            _option(names.SPEED, "FP32"),
            *TEXT_OPTIONS,
            *LIMITS,
        )
        speech = (
            Tensor(names.WAVEFORM, "FP32", (self.samples,)),
            Tensor(names.SAMPLE_COUNT, "INT32", (1,)),
            Tensor(names.SAMPLE_OFFSET, "INT64", (1,)),
            Tensor(names.SAMPLE_RATE, "INT32", (1,)),
            Tensor(names.TOKEN_COUNT, "INT32", (1,)),
            Tensor(names.FINISH_REASON, "BYTES", (1,)),
        )
        parameters: tuple[tuple[str, int | str], ...] = (
            ("family", family.name),
            ("max_characters", MAX_CHARACTERS),
        )
        carried = streamed and family.block_mask
        if carried:
            parameters += (("intra_op_thread_count", 0), ("flow_state_mib", FLOW_STATE_MIB))
        return Stage(
            "tts_stream" if streamed else "tts",
            (*request, *TEXT_STREAM) if streamed else request,
            speech,
            backend="python",
            decoupled=streamed,
            own_graph=carried,
            planned=False,
            parameters=parameters,
        )


def _encoder(
    name: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    tolerance: float = 1e-4,
    learned: bool = True,
) -> Stage:
    return Stage(
        name,
        inputs,
        outputs,
        max_batch=8,
        queue_delay_us=2_000,
        cached=True,
        tolerance=tolerance,
        learned=learned,
    )


def _step(stage: Stage, renamed: Mapping[str, str] = MappingProxyType({})) -> Step:
    """A step whose tensors keep their names, but for inputs `renamed` {model name: ensemble name}."""
    inputs = {t.name: renamed.get(t.name, t.name) for t in stage.inputs}
    return Step(stage, inputs, {t.name: t.name for t in stage.outputs})


PIPELINES = {name: Pipeline(family) for name, family in FAMILIES.items()}


def pipeline_of(family: Family) -> Pipeline:
    """The declarations of a family."""
    return PIPELINES[family.name]
