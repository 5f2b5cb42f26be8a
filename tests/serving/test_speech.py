"""Speech through the real server: unary and streamed, gRPC and HTTP, with real recordings as voices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from cosytriton_client import Client, InvalidInputError, Voice
from cosytriton_ensemble.audio import resample
from cosytriton_ensemble.families import COSYVOICE2

TEXT = "This is voice number five."
LONG_TEXT = "one two three four five six seven eight nine ten, " * 10


def joined(chunks: list[Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([chunk.samples for chunk in chunks])


def test_unary_speech_has_960_samples_for_each_token(client: Client, slt: Voice) -> None:
    audio = client.synthesize(TEXT, slt)
    assert audio.sample_rate == 24_000
    assert audio.samples.size == COSYVOICE2.samples(audio.token_count) > 24_000
    assert np.isfinite(audio.samples).all()
    assert np.abs(audio.samples).max() > 0.05


def test_streamed_speech_is_complete_and_from_the_same_tokens(client: Client, slt: Voice) -> None:
    whole, chunks = client.synthesize(TEXT, slt), list(client.stream(TEXT, slt))
    assert len(chunks) > 1
    assert sum(chunk.token_count for chunk in chunks) == whole.token_count
    assert joined(chunks).size == whole.samples.size


def test_first_chunk_follows_the_official_schedule(client: Client, slt: Voice) -> None:
    """Hop 25, plus what brings the prompt to the 25-token grid, less the 8 frames that are held back."""
    prompt = int(client.encode(slt).prompt_token_count[0, 0])
    mel_tokens = int(client.encode(slt).prompt_frame_count[0, 0]) // 2
    hop = 25 + -min(prompt, mel_tokens) % 25
    first = next(client.stream(TEXT, slt))
    assert first.token_count == hop
    assert first.samples.size == hop * 960 - 8 * 480


def test_first_audio_leaves_before_the_language_model_has_ended(
    client: Client, slt: Voice, metric: Callable[[str], float]
) -> None:
    """This model says 1,000 tokens in 2 s, so a busy machine may miss the moment: one of five shows it."""

    def still_talking(seed: int) -> bool:
        with closing(client.stream(LONG_TEXT, slt, seed=seed)) as stream:
            next(stream)
            return metric("cosytriton_speech_lm_active") == 1

    assert any(still_talking(seed) for seed in range(5))


def test_the_seed_decides(client: Client, slt: Voice) -> None:
    one, same, other = (client.synthesize(TEXT, slt, seed=seed).samples for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert one.size != other.size or not np.array_equal(one, other)


def test_http_gives_what_grpc_gives(server: Any, client: Client, slt: Voice) -> None:
    with Client(server.http_url) as http:
        assert np.array_equal(http.synthesize(TEXT, slt).samples, client.synthesize(TEXT, slt).samples)
        assert np.array_equal(joined(list(http.stream(TEXT, slt))), joined(list(client.stream(TEXT, slt))))


@pytest.mark.parametrize(
    "text", ["He might even have been made amiable himself.", "你好今天天气很好。", "OK 👍 两 three"]
)
def test_real_recording_speaks_english_chinese_and_mixed(client: Client, austen: Voice, text: str) -> None:
    audio = client.synthesize(text, austen)
    assert audio.samples.size == audio.token_count * 960


@pytest.mark.parametrize(
    ("rate", "channels", "suffix"), [(44_100, 1, "wav"), (48_000, 2, "flac"), (24_000, 2, "wav")]
)
def test_other_rates_stereo_and_flac_are_heard_alike(
    client: Client, austen: Voice, tmp_path: Path, rate: int, channels: int, suffix: str
) -> None:
    path = tmp_path / f"voice.{suffix}"
    audio = resample(austen.audio.astype(np.float32), austen.sample_rate, rate)
    soundfile.write(path, np.repeat(audio[:, None], channels, axis=1), rate, subtype="PCM_16")
    given, heard = (client.encode(v).speaker_embedding[0] for v in (austen, Voice.from_wav(path, "words")))
    cosine = given @ heard / np.linalg.norm(given) / np.linalg.norm(heard)
    assert cosine > 0.98


def test_8_khz_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "phone.wav"
    soundfile.write(path, np.random.default_rng(0).normal(0, 0.1, 24_000), 8_000)
    with pytest.raises(InvalidInputError, match="8000 Hz.*16 kHz or more"):
        Voice.from_wav(path, "words")


def test_a_voice_is_encoded_once_by_content(server: Any, slt: Voice, metric: Callable[[str], float]) -> None:
    """A second client with the same audio and another transcript hits Triton's response cache."""
    with Client(server.grpc_url) as first, Client(server.grpc_url) as second:
        first.encode(slt)
        before = metric("nv_cache_num_hits_per_model")
        second.encode(Voice(slt.audio, slt.sample_rate, "quite another transcript"))
        assert metric("nv_cache_num_hits_per_model") - before == 3  # the three voice stages
