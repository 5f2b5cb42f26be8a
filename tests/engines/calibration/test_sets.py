"""Calibration sets: what the pipeline feeds to its graphs when it hears real speech and speaks real text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from cosytriton_engines.calibration import recording
from cosytriton_engines.calibration import sets as calibration
from cosytriton_engines.calibration.builtin_set import builtin_set
from cosytriton_engines.calibration.feed_files import FeedWriter, read_feed
from cosytriton_engines.calibration.graphs import open_graph, stacked
from cosytriton_engines.calibration.language_feeds import SpeakingModel
from cosytriton_engines.calibration.material import CalibrationError, evenly_spaced
from cosytriton_engines.calibration.sets import CalibrationSet, make_set, open_set
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, Family
from cosytriton_ensemble.generation import SpeechRequest
from cosytriton_ensemble.repository import checkpoint_of, version_directory
from cosytriton_ensemble.spec import Array, Feed

STAGES = ("speaker_embedding", "audio_tokenizer", "prompt_mel", "flow", "vocoder", "speech_lm")
TEXTS = "Turn left after the bridge and wait for us.\nIs it late?\n请输入密码。\nNot yet.\nGood.\n"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Three short recordings and five texts: what can be run in seconds."""
    folder = tmp_path_factory.mktemp("material")
    with builtin_set() as (recordings, _):
        for name in ("austen_0930.wav", "austen_0930.txt", "cards_005.wav", "rms_2.wav"):
            shutil.copy(recordings / name, folder)
    texts = folder / "texts" / "mine"
    texts.parent.mkdir()
    texts.write_text(TEXTS, encoding="utf-8")
    return folder, texts


@pytest.fixture(scope="module", autouse=True)
def _short_stream() -> Iterator[None]:
    """Two chunks of a stream are enough here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "STREAMED_SECONDS", 2.6)
        yield


@pytest.fixture(scope="module")
def made(
    tiny_repository: Path, material: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> CalibrationSet:
    return make_set(tiny_repository, tmp_path_factory.mktemp("made") / "set", *material)


@pytest.fixture
def copied(made: CalibrationSet, tmp_path: Path) -> Path:
    """A copy of the set, to be harmed."""
    return Path(shutil.copytree(made.folder, tmp_path / "set"))


# ---- what is in a set ----------------------------------------------------------------------------------


def check_feeds(found: CalibrationSet, repository: Path) -> None:
    """Every feed is one of its graph, which answers it with numbers."""
    for model in found.models:
        folder, graph = (
            ("speech_lm", "text_encoder.onnx") if model == "text_encoder" else (model, "model.onnx")
        )
        session = open_graph(version_directory(repository, folder) / graph)
        kinds = {"tensor(int32)": np.int32, "tensor(float)": np.float32, "tensor(bool)": np.bool_}
        wanted = {value.name: kinds[value.type] for value in session.get_inputs()}
        for feed in found.feeds(model, limit=2):
            assert {name: array.dtype.type for name, array in feed.items()} == wanted
            assert all(np.isfinite(output).all() for output in session.run(None, feed))


def test_every_feed_runs_on_its_graph(made: CalibrationSet, tiny_repository: Path) -> None:
    assert sorted(made.models) == sorted(STAGES)
    check_feeds(made, tiny_repository)


def test_equal_inputs_give_equal_bits(
    made: CalibrationSet, tiny_repository: Path, material: tuple[Path, Path], tmp_path: Path
) -> None:
    again = make_set(tiny_repository, tmp_path / "again", *material)
    assert again.files == made.files
    assert again.digest == made.digest


def test_recordings_are_heard_as_the_server_hears_them(made: CalibrationSet) -> None:
    rows = [row for feed in made.feeds("speaker_embedding") for row in zip(*feed.values(), strict=True)]
    counts = sorted(int(array[0]) for row in rows for array in row if array.shape == (1,))
    assert counts == [52_640, 56_040, 64_080]


def test_streams_are_visited_from_their_first_chunk_to_their_last(made: CalibrationSet) -> None:
    flow = list(made.feeds("flow"))
    kinds = {
        (bool(s[0]), bool(f[0]))
        for feed in flow
        for s, f in zip(feed["streaming"], feed["finalize"], strict=True)
    }
    assert kinds == {(True, False), (True, True), (False, True)}
    assert 0 in {int(count) for feed in flow for count in feed["prompt_token_count"][:, 0]}
    carried = [int(count) for feed in made.feeds("vocoder") for count in feed["source_cache_count"][:, 0]]
    assert 0 in carried
    assert max(carried) > 0


def test_rows_come_alone_and_with_others(made: CalibrationSet) -> None:
    for model in STAGES:
        rows = {len(next(iter(feed.values()))) for feed in made.feeds(model)}
        assert {1, 2} <= rows or model == "speech_lm", model
    assert max(len(feed["input_ids"]) for feed in made.feeds("speech_lm")) == len(TEXTS.splitlines())


def test_caches_lie_on_their_grid_and_prompts_begin_with_empty_ones(made: CalibrationSet) -> None:
    feeds = list(made.feeds("speech_lm"))
    steps = [feed for feed in feeds if feed["past_counts"].any()]
    assert {feed["key_cache.0"].shape[2] % 64 for feed in feeds} == {0}
    assert len({int(count) for feed in steps for count in feed["past_counts"]}) > 3
    for feed in steps:
        for row, count in enumerate(feed["past_counts"]):
            assert feed["key_cache.0"][row, :, :count].any(axis=(0, 2)).all(), "no position is empty"
            assert not feed["key_cache.0"][row, :, count:].any()
    assert not any(feed["value_cache.0"].any() for feed in feeds if not feed["past_counts"].any())


def last_logits(session: ort.InferenceSession, feed: Feed) -> Array:
    logits: Array = session.run(["logits"], feed)[0]
    return logits


@pytest.mark.parametrize(
    "family", [COSYVOICE2, pytest.param(COSYVOICE1, marks=pytest.mark.gate)], ids=lambda f: f.name
)
def test_a_step_tells_what_its_whole_context_tells(
    family: Family, repositories: Callable[[Family], Path]
) -> None:
    """A step behind the real cache of a row, and the same tokens fed at once, agree on the next token."""
    graph = version_directory(repositories(family), "speech_lm") / "model.onnx"
    kept: list[Feed] = []
    model = SpeakingModel(
        graph, family, lambda name, feed: kept.append(feed) if name == "speech_lm" else None
    )
    speeches = model.speak([request(range(20, 40), 1), request(range(50, 53), 2)], [1, 5])
    steps, kept[:] = list(kept), []
    for speech in speeches:
        for made in (1, 5):
            whole = speech.context(made / len(speech.tokens), model.spec.speech_offset)
            model.keep_prompts([whole])
    session = open_graph(graph)
    together = [last_logits(session, step) for step in steps]
    alone = [last_logits(session, feed)[0] for feed in kept]
    np.testing.assert_allclose(
        np.concatenate(together), np.stack([alone[i] for i in (0, 2, 1, 3)]), atol=1e-4
    )


def request(text: Sequence[int], seed: int) -> SpeechRequest:
    return SpeechRequest(text=text, seed=seed, max_tokens=6, speaker=np.ones(192, np.float32))


@pytest.mark.gate
@pytest.mark.parametrize("family", [COSYVOICE1, COSYVOICE3], ids=lambda family: family.name)
def test_every_family_is_fed_what_it_carries(
    family: Family, repositories: Callable[[Family], Path], material: tuple[Path, Path], tmp_path: Path
) -> None:
    repository = repositories(family)
    found = make_set(repository, tmp_path / "set", *material)
    check_feeds(found, repository)
    assert sorted(found.models) == sorted([*STAGES, *(["text_encoder"] if family is COSYVOICE1 else [])])
    if family is COSYVOICE1:
        carried = [int(count) for feed in found.feeds("flow") for count in feed["mu_cache_count"][:, 0]]
        assert 0 in carried
        assert max(carried) > family.fade_frames
    else:
        assert {bool(row) for feed in found.feeds("vocoder") for row in feed["finalize"][:, 0]} == {
            False,
            True,
        }


def test_a_part_is_spread_over_the_whole(made: CalibrationSet) -> None:
    everything = [feed["input_ids"] for feed in made.feeds("speech_lm")]
    part = [feed["input_ids"] for feed in made.feeds("speech_lm", limit=3)]
    assert len(everything) == made.count("speech_lm")
    for given, place in zip(part, (0, round((len(everything) - 1) / 2), -1), strict=True):
        np.testing.assert_array_equal(given, everything[place])
    assert evenly_spaced(range(5), 9) == [0, 1, 2, 3, 4]
    with pytest.raises(CalibrationError, match=r"no feeds of 'vocodr'; it has .*vocoder"):
        next(made.feeds("vocodr"))


def test_a_feed_is_fresh_each_time(made: CalibrationSet) -> None:
    next(made.feeds("flow"))["prompt_mel"][:] = np.nan
    assert np.isfinite(next(made.feeds("flow"))["prompt_mel"]).all()


def test_shorter_rows_are_padded_with_zeros() -> None:
    rows = [{"mel": np.ones((2, 3), np.float32)}, {"mel": np.full((1, 3), 2, np.float32)}]
    assert stacked(rows)["mel"].tolist() == [[[1] * 3, [1] * 3], [[2] * 3, [0] * 3]]


# ---- files ---------------------------------------------------------------------------------------------


def test_an_empty_cache_takes_no_room(tmp_path: Path) -> None:
    cache = np.zeros((2, 4, 640, 64), np.float32)
    writer = FeedWriter(tmp_path)
    writer.write("speech_lm", {"key_cache.0": cache, "input_ids": np.array([[7]], np.int32)})
    feed = read_feed(tmp_path / "speech_lm" / "0000.safetensors")
    assert writer.sizes["speech_lm"] < 1000
    assert feed["key_cache.0"].shape == cache.shape
    assert feed["key_cache.0"].dtype == np.float32
    assert feed["input_ids"].tolist() == [[7]]


def test_nan_is_not_calibrated_with(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"NaN or infinity to vocoder \(mel\)"):
        FeedWriter(tmp_path).write("vocoder", {"mel": np.array([np.nan], np.float32)})


def test_a_set_opens_as_it_was_made(made: CalibrationSet, tiny_repository: Path) -> None:
    found = open_set(made.folder)
    assert (found, found.digest) == (made, made.digest)
    found.check(tiny_repository)


def damage_feed(folder: Path) -> None:
    path = folder / "flow" / "0001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def foreign_checkpoint(folder: Path) -> None:
    card = folder / "set.json"
    card.write_text(card.read_text().replace('"checkpoint": "cosyvoice2:', '"checkpoint": "cosyvoice2:0'))


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "a feed is damaged": (damage_feed, "flow/0001.safetensors is not the file that was written"),
    "a feed is missing": (
        lambda f: (f / "flow/0000.safetensors").unlink(),
        "flow/0000.safetensors is missing",
    ),
    "a feed was added": (
        lambda f: shutil.copy(f / "flow/0000.safetensors", f / "flow/9.safetensors"),
        "not belong",
    ),
    "the card is missing": (lambda f: (f / "set.json").unlink(), "set.json is missing"),
    "the card is damaged": (lambda f: (f / "set.json").write_text("{"), "cannot be used"),
    "the card is another's": (lambda f: (f / "set.json").write_text("[]"), "cannot be used"),
    "the checkpoint was edited": (foreign_checkpoint, "digest"),
}


@pytest.mark.parametrize("how", HARM)
def test_what_cannot_be_trusted_does_not_open(copied: Path, how: str) -> None:
    harm, reason = HARM[how]
    harm(copied)
    with pytest.raises(CalibrationError, match=f"{reason}.*cosytriton calibrate .*--out {copied}"):
        open_set(copied)


def test_a_set_belongs_to_its_checkpoint(
    made: CalibrationSet, tiny_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "checkpoint_of", lambda _: checkpoint_of(tiny_repository)[:-1] + "x")
    with pytest.raises(
        CalibrationError, match=f"another checkpoint.*calibrate --repository {tiny_repository}"
    ):
        made.check(tiny_repository)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), CalibrationError("no")], ids=lambda e: type(e).__name__)
def test_a_run_that_does_not_end_leaves_what_was_there(
    copied: Path, tiny_repository: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    def stop(*_: object) -> None:
        raise end

    before = open_set(copied)
    monkeypatch.setattr(calibration, "record", stop)
    for folder in (copied, copied.with_name("new")):
        with pytest.raises(type(end)):
            make_set(tiny_repository, folder)
    assert open_set(copied) == before
    assert [path.name for path in copied.parent.iterdir()] == ["set"]


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, tiny_repository: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CalibrationError, match="no calibration set; it is left as it is"):
        make_set(tiny_repository, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_texts_that_say_nothing_are_left_out(
    tiny_repository: Path, material: tuple[Path, Path], tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.write_text("...\n?!\n")
    with pytest.raises(CalibrationError, match=r"No text can be spoken. the text '\.\.\.' is left out"):
        make_set(tiny_repository, tmp_path / "set", material[0], texts)
    assert not (tmp_path / "set").exists()


def test_the_command_prints_what_there_is(
    made: CalibrationSet,
    tiny_repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from argparse import ArgumentParser

    from cosytriton_engines.commands import CALIBRATE

    asked: list[object] = []

    def make(*given: object) -> CalibrationSet:
        asked.extend(given)
        return made

    monkeypatch.setattr(calibration, "make_set", make)
    parser = ArgumentParser()
    CALIBRATE.arguments(parser)
    assert CALIBRATE.run(parser.parse_args(["--repository", str(tiny_repository)])) == 0
    assert asked[:2] == [tiny_repository, tiny_repository.parent / "calibration"]
    printed = capsys.readouterr().out
    assert all(model in printed for model in STAGES)
    assert made.digest in printed
