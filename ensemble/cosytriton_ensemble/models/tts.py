"""`tts`: speaks a text and answers once."""

from __future__ import annotations

import numpy as np

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.models.concurrent import ConcurrentModel
from cosytriton_ensemble.models.requests import Sender
from cosytriton_ensemble.models.speaking import Sound, Speaker
from cosytriton_ensemble.pipeline import MAX_ANSWER_SECONDS, Pipeline
from cosytriton_ensemble.spec import Feed, Stage
from cosytriton_ensemble.utterance import read_utterance


class TritonPythonModel(ConcurrentModel):
    """Computes each piece of the text in one go, with full attention."""

    def stage_of(self, pipeline: Pipeline) -> Stage:
        """See `ConcurrentModel`."""
        return pipeline.tts

    def answer(self, feed: Feed, sender: Sender) -> None:
        """Speak one request."""
        family = self.setting.family
        utterance = read_utterance(feed, family, self.voices, self.checkpoint)
        speaker = Speaker(utterance, self.setting.pipeline, self.models, sender, streamed=False)
        parts: list[Sound] = []
        left = MAX_ANSWER_SECONDS * family.sample_rate
        for sound in speaker.sounds():
            left -= sound.samples.size
            if left < 0:
                raise InputError(
                    f"The speech is longer than {MAX_ANSWER_SECONDS} s, which one answer may hold. Ask "
                    "tts_stream, which speaks any length."
                )
            parts.append(sound)
        reasons = [part.reason for part in parts if part.reason != "end"]
        whole = Sound(
            np.concatenate([part.samples for part in parts]),
            sum(part.tokens for part in parts),
            reasons[0] if reasons else "end",
        )
        sender.send(whole.response(0, family.sample_rate), final=True)
