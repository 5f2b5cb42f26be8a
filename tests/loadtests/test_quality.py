"""Answers under load beside answers alone: a rounding passes, every planted fault is named."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from cosytriton_client import Audio, Client, ConnectError, Voice
from cosytriton_loadtests import quality
from cosytriton_loadtests.answers import FOLDER, Answers, lot
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.listener import listen
from cosytriton_loadtests.quality import check
from cosytriton_loadtests.run_folder import RunFolder, RunInfo
from cosytriton_loadtests.samples import Chunk, Sample, write_samples
from cosytriton_loadtests.workload import Ask
from cosytriton_loadtests.workload_file import read_workload

DATA = Path(__file__).parents[1] / "data"
RATE = 24_000
PITCHES = {"low": 110.0, "high": 260.0}


def speech(text: str, voice: str, seed: int) -> Audio:
    """What the imagined server says: the voice is a pitch, text and seed are loudness and length."""
    rng = np.random.default_rng([seed, *text.encode()])
    tokens = 20 + int(rng.integers(10)) + 3 * (voice == "high")
    time = np.arange(tokens * 960) / RATE
    loudness = np.interp(time, np.linspace(0, time[-1], 9), rng.uniform(0.2, 1, 9))
    sound = loudness * sum(np.sin(2 * np.pi * PITCHES[voice] * k * time) / k for k in range(1, 12)) / 4
    return Audio(np.asarray(sound, np.float32), tokens, RATE)


class Imagined:
    """A client of the imagined server."""

    asked: int = 0

    def __init__(self, url: str) -> None:
        if url.startswith("nowhere"):
            raise ConnectError("nobody answers")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synthesize(self, text: str, voice: str, seed: int) -> Audio:
        Imagined.asked += 1
        return speech(text, voice, seed)

    def stream(self, text: str, voice: str, seed: int) -> Generator[Audio, None, None]:
        whole = self.synthesize(text, voice, seed)
        half = whole.token_count // 2
        yield Audio(whole.samples[: half * 960], half, RATE, "")
        yield Audio(whole.samples[half * 960 :], whole.token_count - half, RATE)


def asks(count: int = 12) -> list[Ask]:
    return [
        Ask(
            "talk",
            ("grpc-stream", "grpc")[n % 2],
            f"sentence {n % 3}",
            ("low", "high")[n % 2],
            options={"seed": n},
        )
        for n in range(count)
    ]


def sample_of(ask: Ask, audio: Audio) -> Sample:
    chunk = Chunk(1.0, audio.seconds, 0.0)
    digest = quality._digest(audio)
    return Sample(
        ask.scenario, "steady", ask.protocol, asdict(ask), 0, 0, 1, (chunk,), audio.token_count, digest
    )


Make = Callable[..., RunFolder]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A run in which the server gave each request `change(ask, its own answer)`."""
    monkeypatch.setattr(quality, "Client", Imagined)
    monkeypatch.setattr(Imagined, "asked", 0)
    workload = tmp_path / "workload.toml"
    voices = "".join(f'[voices.{name}]\nname = "{name}"\n' for name in PITCHES)
    scenario = '[scenarios.talk]\ntexts = ["t"]\nvoices = ["low", "high"]\n'
    workload.write_text(f'[texts]\nt = ["sentence 0"]\n{voices}{scenario}')

    def make(change: Callable[[Ask, Audio], Audio] = lambda _, audio: audio, kept: float = 1.0) -> RunFolder:
        folder = RunFolder(tmp_path / "run")
        folder.write_info(RunInfo("localhost:1", "", "closed", 0, (), {"workload": str(workload)}))
        keeper = Answers(folder.path / FOLDER, kept)
        for ask in asks():
            given = change(ask, speech(ask.text, ask.voice, ask.options["seed"]))
            keeper.keep(sample := sample_of(ask, given), [given.samples])
            write_samples(folder.samples_file, [sample])
        return folder

    return make


def changed(audio: Audio, samples: Any) -> Audio:
    return Audio(np.asarray(samples, np.float32), audio.token_count, RATE)


def only(seed: int, change: Callable[[Ask, Audio], Audio]) -> Callable[[Ask, Audio], Audio]:
    return lambda ask, audio: change(ask, audio) if ask.options["seed"] == seed else audio


def test_equal_answers_pass_and_only_the_share_is_asked_again(run: Make) -> None:
    assert check(folder := run(), "localhost:1", 1.0) == []
    assert Imagined.asked == 12
    assert check(folder, "localhost:1", 0.3) == []
    assert Imagined.asked == 12 + sum(lot(asdict(ask)) < 0.3 for ask in asks())
    Imagined.asked = 0
    assert check(folder, "localhost:1", 0.0) == []
    assert Imagined.asked == 1  # one is always looked at


def test_a_rounding_is_no_difference(run: Make) -> None:
    folder = run(lambda _, audio: changed(audio, audio.samples + np.float32(5e-4)))
    assert check(folder, "localhost:1", 1.0) == []
    assert len(check(folder, "localhost:1", 1.0, tolerance=1e-4)) == 12


def test_another_voice_is_called_so(run: Make) -> None:
    folder = run(only(4, lambda ask, _: speech(ask.text, "high", ask.options["seed"])))
    (found,) = check(folder, "localhost:1", 1.0)
    assert found.ask.options["seed"] == 4
    assert found.mixed == "voice 'high'"
    assert found.own is not None
    assert dict(found.others)["voice 'high'"] < 1e-3 < 1 < found.own
    assert "talk, voice 'low', seed 4, 'sentence 1': a mixed voice, it got the answer of voice 'high'" in str(
        found
    )


def test_the_answer_of_another_request_is_found_by_its_digest(run: Make) -> None:
    folder = run(only(4, lambda *_: speech("sentence 2", "high", 5)), kept=0.0)
    (found,) = check(folder, "localhost:1", 1.0)
    assert found.mixed == "talk, voice 'high', 'sentence 2'"
    assert found.own is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda _, audio: Audio(audio.samples, audio.token_count + 1, RATE), "speech tokens under load"),
        (lambda _, audio: changed(audio, audio.samples[4800:]), "s of audio under load"),
        (
            lambda _, audio: changed(
                audio, np.r_[audio.samples[:4800], np.zeros(4800), audio.samples[9600:]]
            ),
            r"from 0.20 to 0.40 s",
        ),
    ],
)
def test_lost_sound_is_a_difference_and_no_mixed_voice(run: Make, fault: Any, said: str) -> None:
    (found,) = check(run(only(7, fault)), "localhost:1", 1.0)
    assert found.ask.options["seed"] == 7
    assert said in str(found)
    assert not found.mixed
    assert "it is not what it gets alone" in str(found)


def test_requests_that_were_not_spoken_to_their_end_are_left_out(run: Make) -> None:
    folder = run()
    samples = list(folder.samples(warm=False))
    folder.samples_file.unlink()
    cut: Iterable[Sample] = (
        Sample.of(asdict(one) | {"error": "ConnectError"} if n % 2 else asdict(one) | {"cancelled": True})
        for n, one in enumerate(samples)
    )
    write_samples(folder.samples_file, cut)
    with pytest.raises(LoadTestError, match="no request was spoken to its end"):
        check(folder, "localhost:1", 1.0)


def test_a_wrong_share_is_refused(run: Make) -> None:
    with pytest.raises(LoadTestError, match=r"share = 2: allowed are 0 to 1"):
        check(run(), "localhost:1", 2)


def test_a_server_that_answers_under_load_as_it_does_alone_passes(
    server: Any, demo_checkpoint: Any, tmp_path: Path
) -> None:
    """Eight streams of two voices at once, through the real client."""
    prompts = demo_checkpoint.path / "prompts"
    tables = "".join(
        f'[voices.{name}]\nwav = "{prompts / name}.wav"\ntranscript = "Hello, number zero two."\n'
        for name in ("slt_1", "rms_2")
    )
    file = tmp_path / "workload.toml"
    scenario = '[scenarios.talk]\ntexts = ["t"]\nvoices = ["slt_1", "rms_2"]\n'
    file.write_text(f'[texts]\nt = ["This is voice number five.", "Thank you."]\n{tables}{scenario}')
    workload = read_workload(file)
    folder = RunFolder(tmp_path / "run")
    folder.write_info(RunInfo(server.grpc_url, "", "closed", 0, (), {"workload": str(file)}))
    mine = [ask for ask, _ in zip(workload.asks(0, 0), range(8), strict=False)]
    with Client(server.grpc_url) as client, ThreadPoolExecutor(8) as pool:

        def ask_for(ask: Ask) -> Sample:
            voice = workload.voice(ask)
            assert isinstance(voice, Voice)
            return listen(client, ask, voice)

        write_samples(folder.samples_file, pool.map(ask_for, mine))
    assert {ask.voice for ask in mine} == {"slt_1", "rms_2"}
    assert check(folder, server.grpc_url, 0.5) == []
