from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from cosytriton_client import Voice
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.workload import BAD_INPUTS, DEFAULT_WORKLOAD, Ask, Workload
from cosytriton_loadtests.workload_file import read_workload

WAV = Path(__file__).parents[1] / "data" / "librivox_austen.wav"
GOOD = f"""
[texts]
en = ["one", "two"]
zh = ["你好。"]

[voices.known]
wav = "{WAV}"
transcript = "words"

[voices.stranger]
wav = "{WAV}"
new = true

[voices.anna]
name = "anna"

[scenarios.often]
weight = 3
texts = ["en", "zh"]
voices = ["known", "anna"]

[scenarios.rare]
protocol = "http"
texts = ["en"]
voices = ["stranger"]
options = {{ speed = 1.5, seed = 7 }}
"""

Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    def write(text: str) -> Path:
        path = tmp_path / "workload.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def workload(written: Written) -> Workload:
    return read_workload(written(GOOD))


def asks(workload: Workload, count: int = 2000, seed: int = 0, user: int = 0) -> list[Ask]:
    return list(islice(workload.asks(seed, user), count))


def test_the_default_workload_has_what_a_mix_needs() -> None:
    workload = read_workload(DEFAULT_WORKLOAD)
    assert workload.protocols() == {"grpc-stream", "grpc", "http", "http-stream"}
    assert {"en", "zh", "long"} <= set(workload.texts)
    assert any(speaker.new for speaker in workload.voices.values())
    assert {ask.scenario for ask in asks(workload)} == set(workload.scenarios)


def test_scenarios_come_by_their_weight(workload: Workload) -> None:
    counts = Counter(ask.scenario for ask in asks(workload))
    assert abs(counts["often"] / 2000 - 0.75) < 0.04
    often = [ask for ask in asks(workload) if ask.scenario == "often"]
    assert Counter(ask.text for ask in often).keys() == {"one", "two", "你好。"}
    assert Counter(ask.voice for ask in often).keys() == {"known", "anna"}


def test_the_same_seed_and_user_give_the_same_requests(workload: Workload) -> None:
    assert asks(workload) == asks(workload)
    assert asks(workload, seed=1) != asks(workload) != asks(workload, user=1)
    seeds = [ask.options["seed"] for ask in asks(workload) if ask.scenario == "often"]
    assert len(set(seeds)) == len(seeds)


def test_options_are_those_of_the_scenario(workload: Workload) -> None:
    rare = next(ask for ask in asks(workload) if ask.scenario == "rare")
    assert rare.options == {"speed": 1.5, "seed": 7}
    assert rare.protocol == "http"


def test_a_request_can_be_made_again_from_its_sample(workload: Workload) -> None:
    one = asks(workload)[0]
    assert Ask(**asdict(one)) == one


def test_a_new_voice_is_another_recording_for_the_server_alone(workload: Workload) -> None:
    new = [ask for ask in asks(workload, 200) if ask.voice == "stranger"]
    voices = [workload.voice(ask) for ask in new]
    known = workload.voice(Ask("often", "grpc", "one", "known"))
    assert isinstance(known, Voice)
    assert (
        len({voice.digest for voice in voices if isinstance(voice, Voice)} | {known.digest}) == len(new) + 1
    )
    assert isinstance(voices[0], Voice)
    assert float(np.sqrt(np.mean((voices[0].audio - known.audio) ** 2))) < 2e-4
    again = workload.voice(new[0])
    assert isinstance(again, Voice)
    assert again.digest == voices[0].digest


def test_known_voices(workload: Workload) -> None:
    assert [voice.transcript for voice in workload.known_voices()] == ["words"]
    assert workload.voice(Ask("often", "grpc", "one", "anna")) == "anna"


def test_shares_of_leavers_and_bad_requests(workload: Workload) -> None:
    mixed = asks(workload.with_shares(cancel=0.1, bad=0.02), 5000)
    assert abs(sum(bool(ask.bad) for ask in mixed) / 5000 - 0.02) < 0.008
    streams = [ask for ask in mixed if ask.streams]
    assert abs(sum(ask.cancel_after > 0 for ask in streams) / len(streams) - 0.1) < 0.02
    assert all(ask.cancel_after == 0 for ask in mixed if not ask.streams or ask.bad)
    assert {ask.bad for ask in mixed if ask.bad} == set(BAD_INPUTS)
    assert all(BAD_INPUTS[ask.bad].items() <= ask.options.items() for ask in mixed if ask.bad)


def test_shares_leave_all_other_choices_as_they_are(workload: Workload) -> None:
    plain, mixed = asks(workload), asks(workload.with_shares(cancel=0.5))
    assert [replace(ask, cancel_after=0) for ask in mixed] == plain


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_between_0_and_1(workload: Workload, share: float) -> None:
    with pytest.raises(LoadTestError, match="allowed are 0 to 1"):
        workload.with_shares(bad=share)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[texts]", "[words]", "has no 'words'; allowed are texts, voices, scenarios"),
        ('zh = ["你好。"]', "zh = []", r"texts.zh = \[\]: allowed is a list of strings"),
        ('zh = ["你好。"]', 'zh = [" "]', "texts.zh"),
        ("[voices.anna]\nname", "[voices.anna]\nwavv", "voices.anna has no 'wavv'; allowed are wav"),
        ('name = "anna"', f'name = "anna"\nwav = "{WAV}"', "either wav .* or name"),
        ('name = "anna"', 'name = "anna"\nnew = true', "neither new nor transcript"),
        ("new = true", 'new = "yes"', "voices.stranger.new = 'yes': allowed is a value of type bool"),
        (f'wav = "{WAV}"\nnew', 'wav = "gone.wav"\nnew', "gone.wav: there is no such audio file"),
        ("weight = 3", "weight = 0", "scenarios.often.weight = 0: allowed is a number above 0"),
        ("weight = 3", "weight = true", "scenarios.often.weight = True"),
        ("weight = 3", "wait = 3", "scenarios.often has no 'wait'; allowed are texts, voices, weight"),
        ('"http"', '"smtp"', "protocol = 'smtp': allowed is one of grpc-stream, grpc, http, http-stream"),
        ('texts = ["en"]', 'texts = ["fr"]', "scenarios.rare.texts = 'fr': allowed is one of en, zh"),
        ('voices = ["stranger"]', 'voices = ["bob"]', "voices = 'bob': allowed is one of known"),
        ('voices = ["stranger"]', "", "scenarios.rare.voices = None: allowed is a list of strings"),
        ("speed = 1.5", "pace = 1.5", "options has no 'pace'; allowed are seed, speed"),
        ("speed = 1.5", 'speed = "fast"', "options.speed = 'fast': allowed is a value of type float"),
        ("speed = 1.5", 'mode = "sing"', "options.mode = 'sing': allowed is one of zero_shot"),
        ("weight = 3", "cancel_share = 2", "cancel_share = 2: allowed are 0 to 1"),
        ('"http"', '"http"\ncancel_share = 0.1', "cancel_share = 0.1: allowed is 0: only a stream"),
        ("[texts]", "[texts", "this is no TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(written: Written, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(LoadTestError, match=message) as caught:
        read_workload(written(GOOD.replace(old, new)))
    assert "workload.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"none\.toml: the workload cannot be read .* give a TOML file"):
        read_workload(tmp_path / "none.toml")
