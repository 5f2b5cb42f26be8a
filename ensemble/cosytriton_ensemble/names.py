"""Names that cross a border: between models, and between the client and the server. Mostly tensors."""

from __future__ import annotations

VOICES_VARIABLE = "COSYTRITON_VOICES"  # of the environment: the folder of enrolled voices
LOOPBACK_VARIABLE = "COSYTRITON_GRPC_URL"  # of the environment: where a model's own server listens
LM_VARIABLE = "COSYTRITON_LM_URL"  # of the environment: where the language model is, if in another server
DRAIN_VARIABLE = "COSYTRITON_DRAIN"  # of the environment: the file that is there when the server is stopping
TLS_VARIABLE = "COSYTRITON_TLS"  # of the environment: the folder of `tls.open_channel`
SHRINKAGE = "memory.enable_memory_arena_shrinkage"  # of ONNX Runtime and of Triton's backend
PROBE = "cosytriton-health"  # id of a request that only asks whether a model works
MODEL_FILE, DEVICE = "model_file", "device"  # parameters of a Python model with a graph
PRECEDENCE_VARIABLE = "COSYTRITON_PRECEDENCE"  # of the environment: the file of `turns.Precedence`
THREADS_VARIABLE = "COSYTRITON_THREADS"  # of the environment: what a graph computes with; 0: every core

# reference audio
AUDIO = "audio"
SAMPLE_RATE = "sample_rate"
WAVEFORM_16K = "waveform_16k"
SAMPLE_COUNT_16K = "sample_count_16k"
WAVEFORM_MODEL = "waveform_model"  # at the model's own rate
SAMPLE_COUNT_MODEL = "sample_count_model"

# an encoded voice
PROMPT_TOKENS = "prompt_tokens"
PROMPT_TOKEN_COUNT = "prompt_token_count"
PROMPT_MEL = "prompt_mel"
PROMPT_FRAME_COUNT = "prompt_frame_count"
SPEAKER_EMBEDDING = "speaker_embedding"
CHECKPOINT = "checkpoint"  # hash of the checkpoint that the voice was encoded with

# a request to speak
TEXT = "text"
PROMPT_TEXT = "prompt_text"  # transcript of the reference
INSTRUCT_TEXT = "instruct_text"
MODE = "mode"
VOICE_NAME = "voice_name"
SOURCE_TOKENS = "source_tokens"
SOURCE_TOKEN_COUNT = "source_token_count"
SPEED = "speed"
SEED = "seed"
MAX_TOKENS = "max_tokens"
NORMALISE = "normalise"
KEEP_MARKUP = "keep_markup"
OFFICIAL = "official"
TEXT_STREAM = "text_stream"  # the pieces of one streamed text carry the same one
TEXT_END = "text_end"

# text and speech tokens
TEXT_TOKENS = "text_tokens"
PROMPT_TEXT_COUNT = "prompt_text_count"
PREFIX_COUNT = "prefix_count"
PIECE_COUNTS = "piece_counts"
TOKENS = "tokens"
TOKEN_COUNT = "token_count"
FINISH_REASON = "finish_reason"

# flow and vocoder
STREAMING = "streaming"
FINALIZE = "finalize"
NOISE_OFFSET = "noise_offset"
MU_CACHE = "mu_cache"
MU_CACHE_COUNT = "mu_cache_count"
MU_CACHE_OUT = "mu_cache_out"
MEL = "mel"
FRAME_COUNT = "frame_count"
SOURCE_CACHE = "source_cache"
SOURCE_CACHE_COUNT = "source_cache_count"
PHASE = "phase"
PHASE_FRAME = "phase_frame"
PHASE_OUT = "phase_out"
SOURCE = "source"
WAVEFORM = "waveform"
SAMPLE_COUNT = "sample_count"
SAMPLE_OFFSET = "sample_offset"
