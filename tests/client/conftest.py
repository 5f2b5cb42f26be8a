"""A transport without a server, and a voice."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from cosytriton_client import Request, Transport, Voice
from cosytriton_client._audio import Samples
from cosytriton_client._transport import Tensors
from cosytriton_ensemble.spec import Array

SAMPLES_PER_TOKEN = 960  # 24,000 Hz / 25 tokens a second


def speech_of(
    tokens: int, padding: int = 0, samples: int | None = None, offset: int = 0, reason: str = "end"
) -> dict[str, Array]:
    """An answer of `tts` or one of `tts_stream`: a tone, zero-padded on the right."""
    count = tokens * SAMPLES_PER_TOKEN if samples is None else samples
    tone = np.sin(np.arange(count) / 10).astype(np.float32) / 2
    return {
        "waveform": np.pad(tone, (0, padding))[None],
        "sample_count": np.array([[count]], np.int32),
        "sample_offset": np.array([[offset]], np.int64),
        "sample_rate": np.array([[24_000]], np.int32),
        "token_count": np.array([[tokens]], np.int32),
        "finish_reason": np.array([[reason.encode()]], np.object_),
    }


def encoded(tokens: int = 4) -> dict[str, Array]:
    """An answer of `voice_encoder`."""
    return {
        "prompt_tokens": np.arange(tokens, dtype=np.int32)[None],
        "prompt_token_count": np.array([[tokens]], np.int32),
        "prompt_mel": np.zeros((1, 2 * tokens, 80), np.float32),
        "prompt_frame_count": np.array([[2 * tokens]], np.int32),
        "speaker_embedding": np.ones((1, 192), np.float32),
        "checkpoint": np.array([[b"cosyvoice2:abc"]], np.object_),
    }


@dataclass
class FakeTransport(Transport):
    """Answers with what it was given and remembers what it was asked."""

    voice: Tensors = field(default_factory=encoded)
    whole: Tensors = field(default_factory=lambda: speech_of(3, padding=500))
    chunks: list[Tensors] = field(
        default_factory=lambda: [speech_of(2, reason=""), speech_of(1, offset=1920)]
    )
    requests: list[Request] = field(default_factory=list)
    further: list[Tensors] | None = None
    cancelled: bool = False
    closed: bool = False

    def infer(self, request: Request) -> Tensors:
        self.requests.append(request)
        return {"voice_encoder": self.voice, "tts": self.whole}[request.model]

    def stream(
        self, request: Request, further: Iterable[Tensors] | None = None
    ) -> Generator[Tensors, None, None]:
        self.requests.append(request)
        self.further = None if further is None else list(further)
        self.cancelled = True
        yield from self.chunks
        self.cancelled = False

    def close(self) -> None:
        self.closed = True

    def models(self) -> list[str]:
        return [request.model for request in self.requests]


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def speech() -> Callable[..., dict[str, Array]]:
    """Makes answers: `speech(tokens, padding=0, samples=None, offset=0, reason="end")`."""
    return speech_of


@pytest.fixture(scope="session")
def samples() -> Samples:
    """One second at 16 kHz."""
    return np.asarray(np.sin(np.arange(16_000) / 8) / 2, np.float32)


@pytest.fixture
def voice(samples: Samples) -> Voice:
    return Voice(samples, 16_000, "what is said")
