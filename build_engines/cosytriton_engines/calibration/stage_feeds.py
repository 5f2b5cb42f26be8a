"""What the native stages are fed when recordings are encoded and speech is made of tokens.

The calls are those of the served pipeline (`audio_frontend`, `voice_encoder`, `Speaker` of `tts` and
`tts_stream`), in this process. The ten Euler steps of the flow are a loop inside its graph, so that each of
its feeds visits all ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cosytriton_engines.calibration.graphs import Stages
from cosytriton_engines.calibration.material import Recording
from cosytriton_ensemble import names
from cosytriton_ensemble.audio import Waveform, resample
from cosytriton_ensemble.pipeline import ANALYSIS_RATE, SAMPLES_16K, Pipeline
from cosytriton_ensemble.spec import Array, Dim, Feed
from cosytriton_ensemble.streaming import Chunks, FlowCall, chunks_of, vocoder_of
from cosytriton_ensemble.voice import Voice

# Of a recording, this much prompts the language model and the flow: the flow computes it anew with each call,
# at full size for up to 5 s a second on two cores.
PROMPT_SECONDS = 6


def encode(recording: Recording, pipeline: Pipeline, stages: Stages) -> Voice:
    """Encode a recording with the three voice stages.

    Its mel, real speech that the vocoder can say without waiting for the flow, is kept for it. Raises
    `InputError` when the graphs give no voice.
    """
    family, audio, rate = pipeline.family, recording.audio, recording.rate
    low = _padded(resample(audio, rate, ANALYSIS_RATE), SAMPLES_16K)
    high = _padded(resample(audio, rate, family.sample_rate), pipeline.samples_model)
    heard = dict(zip((names.WAVEFORM_16K, names.SAMPLE_COUNT_16K), low, strict=True))
    heard |= zip((names.WAVEFORM_MODEL, names.SAMPLE_COUNT_MODEL), high, strict=True)
    encoded: Feed = {}
    for stage in (pipeline.speaker_embedding, pipeline.audio_tokenizer, pipeline.prompt_mel):
        encoded |= stages.call(stage, heard)
    voice = replace(Voice.from_feed(encoded).checked(family), transcript=recording.transcript)
    stages.keep(pipeline.vocoder, vocoder_of(family, official=False).feed(voice.mel, final=True))
    return _prompting(voice, pipeline)


def speak(voice: Feed, tokens: Sequence[int], streamed: bool, pipeline: Pipeline, stages: Stages) -> int:
    """Speak tokens in a voice, chunk by chunk or in one; returns how many chunks there were."""
    made = 0
    chunks = chunks_of(pipeline.family, voice, streamed, official=False)
    vocoder = vocoder_of(pipeline.family, official=False)
    while call := chunks.next_call(len(tokens), ended=True):
        outputs = stages.call(pipeline.flow, _flow_feed(voice, tokens, call, chunks, pipeline))
        mel = chunks.mel(call, outputs)
        vocoder.emit(stages.call(pipeline.vocoder, vocoder.feed(mel, call.finalize)), call.finalize)
        made += 1
    return made


def keep_flow(voice: Feed, tokens: Sequence[int], streamed: bool, pipeline: Pipeline, stages: Stages) -> None:
    """Keep the first call of the flow that `speak` would make, without making it."""
    chunks = chunks_of(pipeline.family, voice, streamed, official=False)
    if call := chunks.next_call(len(tokens), ended=True):
        stages.keep(pipeline.flow, _flow_feed(voice, tokens, call, chunks, pipeline))


def _flow_feed(
    voice: Feed, tokens: Sequence[int], call: FlowCall, chunks: Chunks, pipeline: Pipeline
) -> Feed:
    given = np.array(tokens[call.first : call.end], np.int32)
    padding = pipeline.tokens.padded(given.size) - given.size
    said = {names.TOKENS: np.pad(given, (0, padding)), names.TOKEN_COUNT: np.array([given.size], np.int32)}
    return voice | said | chunks.inputs(call)


def _prompting(voice: Voice, pipeline: Pipeline) -> Voice:
    """The voice, cut to `PROMPT_SECONDS`; a transcript would say more than is left of it."""
    count = PROMPT_SECONDS * pipeline.family.token_rate
    if len(voice.tokens) <= count:
        return voice
    frames = pipeline.family.frames(count)
    return replace(voice, tokens=voice.tokens[:count], mel=voice.mel[:frames], transcript="")


def _padded(audio: Waveform, dim: Dim) -> tuple[Array, Array]:
    return np.pad(audio, (0, dim.padded(audio.size) - audio.size)), np.array([audio.size], np.int32)
