"""`tts_stream`: speaks chunk by chunk while the language model is still talking, or the text still coming."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cosytriton_ensemble import names
from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.metrics import FLOW_STATE
from cosytriton_ensemble.models.concurrent import ConcurrentModel
from cosytriton_ensemble.models.metrics import Readings
from cosytriton_ensemble.models.requests import Sender
from cosytriton_ensemble.models.sources import Inbox, Requests, StreamedSentences, StreamedText, TokenSource
from cosytriton_ensemble.models.speaking import Speaker
from cosytriton_ensemble.pipeline import Pipeline
from cosytriton_ensemble.spec import Feed, Stage
from cosytriton_ensemble.text import TextFrontend
from cosytriton_ensemble.utterance import Utterance, number_of, read_utterance, text_of

if TYPE_CHECKING:
    from cosytriton_ensemble.streaming_flow import StreamingFlow


class TritonPythonModel(ConcurrentModel):
    """Keeps the inboxes of the texts that are still coming; the rest of a request is its own."""

    def stage_of(self, pipeline: Pipeline) -> Stage:
        """See `ConcurrentModel`."""
        return pipeline.tts_stream

    def initialize(self, args: dict[str, str]) -> None:
        """Open the tokenizer, which streamed text needs here."""
        self._flow: StreamingFlow | None = None  # the metrics are read at once
        super().initialize(args)
        self._inboxes: dict[str, Inbox] = {}
        self._lock = threading.Lock()
        self._limit = self.setting.number("max_characters")
        self._frontend = TextFrontend(self.setting.tokenizer, max_characters=self._limit)
        self._flow = self._open_flow()

    def _open_flow(self) -> StreamingFlow | None:
        """The flow with the state of its streams, where the family and the profile have one."""
        setting = self.setting
        if not setting.has_graph:
            return None
        from cosytriton_ensemble.streaming_flow import StreamingFlow  # brings ONNX Runtime

        return StreamingFlow.open(
            setting.graph(),
            setting.family,
            device=setting.device,
            threads=setting.number("intra_op_thread_count"),
            budget=setting.number("flow_state_mib") << 20,
        )

    def readings(self) -> Readings:
        """See `ConcurrentModel`."""
        return {(FLOW_STATE, ""): self._flow.nbytes() if self._flow else 0}

    def begin(self, feed: Feed, sender: Sender) -> None:
        """Take a request, or a further piece of the text of an earlier one, in the order of arrival."""
        with sender.guard():
            stream = text_of(feed, names.TEXT_STREAM)
            if not stream or self._registered(stream, feed):
                super().begin(feed, sender)
            else:
                sender.end()

    def _registered(self, stream: str, feed: Feed) -> bool:
        """Put a piece into its inbox; whether it is the first of its text."""
        first = names.SPEAKER_EMBEDDING in feed or names.VOICE_NAME in feed
        with self._lock:
            inbox = self._inboxes.get(stream)
            if first and inbox is not None:
                raise InputError(f"The {names.TEXT_STREAM} {stream[:40]!r} is in use; choose a random one.")
            if inbox is None:
                if not first:
                    raise InputError(
                        "The text belongs to no stream that is being spoken: it has ended, or never "
                        "began. Begin one with a voice."
                    )
                inbox = self._inboxes[stream] = Inbox(self._limit)
        inbox.put(text_of(feed, names.TEXT))
        if number_of(feed, names.TEXT_END, 0):
            inbox.close()
        return first

    def serve(self, feed: Feed, sender: Sender) -> None:
        """Answer a request, and forget its text."""
        try:
            super().serve(feed, sender)
        finally:
            with self._lock:
                self._inboxes.pop(text_of(feed, names.TEXT_STREAM), None)

    def answer(self, feed: Feed, sender: Sender) -> None:
        """Speak one request."""
        stream = text_of(feed, names.TEXT_STREAM)
        utterance = read_utterance(feed, self.setting.family, self.voices, self.checkpoint)
        source = self._source(utterance, self._inboxes[stream]) if stream else None
        speaker = Speaker(utterance, self.setting.pipeline, self.models, sender, True, self._flow)
        offset = 0
        for sound in speaker.sounds(source):
            sender.send(sound.response(offset, self.setting.family.sample_rate))
            offset += sound.samples.size
        sender.end()

    def _source(self, utterance: Utterance, inbox: Inbox) -> TokenSource:
        requests = Requests(utterance, self.setting.family)
        if self.setting.family.bistream:
            return StreamedText(inbox, requests, self._frontend)
        return StreamedSentences(inbox, requests, self.models, self._frontend)
