"""Runs the pipeline on calibration material and records what every stage is fed.

Voices are encoded, texts are spoken by the language model in these voices, and some of the speech is made
audible by the flow and the vocoder, all with the repository's FP32 graphs. Every count below trades variety
for time: with them, a full-size repository takes a few minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cosytriton_engines.calibration.graphs import Keep, Stages
from cosytriton_engines.calibration.language_feeds import ROWS, STEPS, SpeakingModel, Speech
from cosytriton_engines.calibration.material import (
    CalibrationError,
    Material,
    evenly_spaced,
    speaker_warnings,
)
from cosytriton_engines.calibration.stage_feeds import encode, keep_flow, speak
from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.generation import SpeechRequest
from cosytriton_ensemble.modes import Ask, Mode, plan
from cosytriton_ensemble.pipeline import SPEAKER_SIZE, pipeline_of
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.repository import TOKENIZER, family_of, is_untrained, version_directory
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.text import TextFrontend
from cosytriton_ensemble.voice import Voice

SEED = 0
MAX_SPOKEN = 24  # texts that the language model speaks
MAX_READ = 16  # further ones that it reads, and says nothing
SECONDS = 2.0  # of speech of a text: about a quarter of a minute for each group at full size
# Of the longest text: two chunks that others follow (102 tokens of v2 and v3, 220 of v1) and the last one.
STREAMED_SECONDS = 4.5
MIN_CHUNKS = 2  # of the stream, so that a chunk that continues another one is calibrated
WHOLE = 2  # texts made audible in one piece, besides the streamed one: the flow takes half of all the time
FLOW_CALLS = 8  # further calls of the flow that are recorded and not made
SINGLE_PROMPTS = 8  # prompts that the language model is fed alone
PROMPT_ROWS = 4  # prompts that it is fed at once
# Of five texts two continue a voice with its transcript, two without, and one knows the speaker alone.
MODES: Sequence[Mode] = ("zero_shot", "cross_lingual", "zero_shot", "cross_lingual", "sft")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
    """One text in one voice: what the language model is asked, and the voice that the flow hears."""

    request: SpeechRequest
    voice: Feed


def record(repository: Path, material: Material, keep: Keep, progress: Progress) -> list[str]:
    """Hand every feed to `keep`; returns warnings.

    Raises `CalibrationError` when no recording or no text can be used, and what the graphs raise.
    """
    return _Recorder(repository, keep, progress).record(material)


class _Recorder:
    def __init__(self, repository: Path, keep: Keep, progress: Progress) -> None:
        self._repository, self._keep, self._progress = repository, keep, progress
        self._pipeline = pipeline_of(family_of(repository))
        self._frontend = TextFrontend(self._path(self._pipeline.text_frontend.name, TOKENIZER))
        self._stages = Stages(repository)
        self._warnings: list[str] = []

    def record(self, material: Material) -> list[str]:
        voices, texts = self._voices(material), self._texts(material)
        self._stages.release()
        spoken = sorted(evenly_spaced(texts, MAX_SPOKEN), key=len, reverse=True)
        lines = self._lines(spoken, voices)
        read = evenly_spaced([text for text in texts if text not in spoken], MAX_READ)
        speeches = self._speeches(lines, self._lines(read, voices))
        self._stream(lines[0], speeches, voices)
        self._pieces(lines[1:], speeches[1:])
        self._stages.release()
        for name, feed in self._stages.feeds():
            self._keep(name, feed)
        return self._warnings

    def _path(self, model: str, file: str = FP32_GRAPH) -> Path:
        return version_directory(self._repository, model) / file

    def _voices(self, material: Material) -> list[Voice]:
        self._progress(f"encoding {len(material.recordings)} recordings")
        voices = []
        for recording in material.recordings:
            try:
                voice = encode(recording, self._pipeline, self._stages)
            except InputError as error:
                self._warnings.append(f"{recording.name} is left out: {error}")
                continue
            try:
                self._frontend.prompt(voice.transcript, "transcript")
            except InputError as error:
                self._warnings.append(f"{recording.name}: its transcript is not used: {error}")
                voice = replace(voice, transcript="")
            voices.append(voice)
        if not voices:
            raise CalibrationError(f"No recording can be encoded. {' '.join(self._warnings)}")
        if not is_untrained(self._repository):  # random weights hear no difference
            self._warnings += speaker_warnings([voice.speaker for voice in voices])
        return voices

    def _texts(self, material: Material) -> list[list[int]]:
        """The ids of each piece of each text."""
        pieces: list[list[int]] = []
        for text in material.texts:
            try:
                pieces += self._frontend.segments(text)
            except InputError as error:
                self._warnings.append(f"the text {text[:20]!r} is left out: {error}")
        if not pieces:
            raise CalibrationError(f"No text can be spoken. {' '.join(self._warnings)}")
        return pieces

    def _lines(self, texts: Sequence[list[int]], voices: Sequence[Voice]) -> list[_Line]:
        """Each text in one of the voices, in one of the modes; the first one may get longer."""
        return [
            self._line(
                ids,
                voices[place % len(voices)],
                MODES[place % len(MODES)],
                SEED + place,
                SECONDS if place else STREAMED_SECONDS,
            )
            for place, ids in enumerate(texts)
        ]

    def _line(self, ids: list[int], voice: Voice, mode: Mode, seed: int, seconds: float) -> _Line:
        family = self._pipeline.family
        if mode == "zero_shot" and not voice.transcript:
            mode = "cross_lingual"
        how = plan(family, Ask(mode, transcript=voice.transcript))
        prompt = self._frontend.prompt(how.prompt_text, "transcript")
        request = SpeechRequest(
            text=[*prompt, *ids],
            prompt_text_count=len(prompt),
            prompt_speech=voice.tokens.tolist() if how.lm_prompt else (),
            seed=seed,
            max_tokens=round(seconds * family.token_rate),
            speaker=voice.speaker if how.lm_speaker else np.zeros(SPEAKER_SIZE, np.float32),
        )
        return _Line(request, voice.feed(family, how.flow_prompt))

    def _speeches(self, spoken: Sequence[_Line], read: Sequence[_Line]) -> list[Speech]:
        """Have the language model speak some lines and read the others."""
        model = SpeakingModel(self._path(self._pipeline.speech_lm.name), self._pipeline.family, self._keep)
        speeches: list[Speech] = []
        for group, start in enumerate(range(0, len(spoken), ROWS)):
            end = min(start + ROWS, len(spoken))
            self._progress(f"speaking texts {start + 1} to {end} of {len(spoken)}")
            requests = [line.request for line in spoken[start:end]]
            speeches += model.speak(requests, STEPS[group % len(STEPS)])
        for speech in evenly_spaced(speeches, SINGLE_PROMPTS):
            model.keep_prompts([speech.prompt])
        prompts = [model.prompt_of(line.request) for line in read]
        for start in range(0, len(prompts), PROMPT_ROWS):
            model.keep_prompts(prompts[start : start + PROMPT_ROWS])
        model.keep_contexts(speeches)
        return speeches

    def _stream(self, line: _Line, speeches: Sequence[Speech], voices: Sequence[Voice]) -> None:
        """Make the longest speech audible chunk by chunk."""
        self._progress("making a stream audible")
        longest = round(STREAMED_SECONDS * self._pipeline.family.token_rate)
        said = [speech.heard for speech in speeches]
        # A text may turn out short. The tokens of a recording are streamed as well, when it is converted.
        said += [voice.tokens[:longest].tolist() for voice in voices]
        if speak(line.voice, max(said, key=len), True, self._pipeline, self._stages) < MIN_CHUNKS:
            self._warnings.append(
                "all speech is too short for a stream of several chunks, whose later ones are fed otherwise: "
                f"give a text or a recording of {STREAMED_SECONDS:g} s"
            )

    def _pieces(self, lines: Sequence[_Line], speeches: Sequence[Speech]) -> None:
        """Make some of the speech audible in one piece, and keep how the flow would begin some more."""
        for place, (line, speech) in enumerate(zip(lines, speeches, strict=True)):
            if place < WHOLE:
                self._progress(f"making text {place + 1} of {min(WHOLE, len(speeches))} audible")
                speak(line.voice, speech.heard, False, self._pipeline, self._stages)
            elif place < WHOLE + FLOW_CALLS:
                keep_flow(line.voice, speech.heard, place % 2 == 0, self._pipeline, self._stages)
