"""The speakers of a checkpoint: both forms of spk2info.pt, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE3, FAMILIES
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.layout import SPEAKERS
from cosytriton_export.speakers import Speaker, read_speakers
from cosytriton_export.tokenizer import build_tokenizer
from cosytriton_export.writer import write_checkpoint

Entry = dict[str, Any]


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("written") / "checkpoint", family=request.param)


def whole(tokens: int = 10, frames: int = 20, padding: int = 0) -> Entry:
    """What the official front end knows of a reference; `padding` stands behind the valid lengths."""
    embedding = torch.arange(1.0, 193.0)[None]
    codes = torch.arange(tokens + padding, dtype=torch.int32)[None]
    return {
        "prompt_text": torch.tensor([[5, 6, 7]]),
        "prompt_text_len": torch.tensor([3], dtype=torch.int32),
        "llm_prompt_speech_token": codes,
        "llm_prompt_speech_token_len": torch.tensor([tokens], dtype=torch.int32),
        "flow_prompt_speech_token": codes,
        "flow_prompt_speech_token_len": torch.tensor([tokens], dtype=torch.int32),
        "prompt_speech_feat": torch.full((1, frames + padding, 80), -4.0),
        "prompt_speech_feat_len": torch.tensor([frames], dtype=torch.int32),
        "llm_embedding": embedding,
        "flow_embedding": embedding,
    }


@pytest.fixture
def read(tiny_checkpoint: Checkpoint, tmp_path: Path) -> Callable[[object], dict[str, Speaker]]:
    """Read a file with this content."""

    def read(content: object) -> dict[str, Speaker]:
        copy = Path(shutil.copytree(tiny_checkpoint.path, tmp_path / "copy"))
        torch.save(content, copy / SPEAKERS)
        return read_speakers(Checkpoint.open(copy))

    return read


def test_an_untrained_checkpoint_has_speakers_that_fit_it(written: Checkpoint) -> None:
    first, second = read_speakers(written).values()
    assert (first.name, second.name) == ("中文女", "英文女")
    assert first.embedding.shape == second.embedding.shape == (192,)
    assert not np.array_equal(first.embedding, second.embedding)
    assert len(first.prompt_tokens) == len(first.prompt_mel) == len(first.prompt_text_ids) == 0
    assert first.prompt_mel.shape == (0, 80)
    if written.family is COSYVOICE1:
        assert len(second.prompt_tokens) == 0
        return
    assert second.prompt_mel.shape == (2 * len(second.prompt_tokens), 80)
    tokenizer = build_tokenizer(written)
    if written.family is COSYVOICE3:  # its language model insists on this token
        assert tokenizer.token_to_id("<|endofprompt|>") in second.prompt_text_ids
    assert tokenizer.decode(second.prompt_text_ids.tolist()).endswith("this is a voice.")


def test_a_checkpoint_without_the_file_has_no_speakers(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_checkpoint.path, tmp_path / "copy"))
    (copy / SPEAKERS).unlink()
    assert read_speakers(Checkpoint.open(copy)) == {}


def test_an_embedding_alone_is_a_speaker(read: Callable[[object], dict[str, Speaker]]) -> None:
    embedding = torch.randn(1, 192, dtype=torch.float16)
    speaker = read({"中文女": {"embedding": embedding, "anything": "else"}})["中文女"]
    assert speaker.embedding.dtype == np.float32
    np.testing.assert_array_equal(speaker.embedding, embedding[0].float())
    assert speaker.prompt_tokens.dtype == speaker.prompt_text_ids.dtype == np.int32


def test_a_whole_reference_is_cut_to_its_lengths(read: Callable[[object], dict[str, Speaker]]) -> None:
    speaker = read({"me": whole(tokens=10, frames=20, padding=3)})["me"]
    np.testing.assert_array_equal(speaker.prompt_tokens, np.arange(10))
    assert speaker.prompt_mel.shape == (20, 80)
    np.testing.assert_array_equal(speaker.prompt_text_ids, [5, 6, 7])
    np.testing.assert_array_equal(speaker.embedding, np.arange(1, 193))


def without(*keys: str) -> Entry:
    return {key: value for key, value in whole().items() if key not in keys}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([torch.ones(1, 192)], "list is given, not a mapping"),
        ({}, "there is no embedding"),
        (
            {"embedding": torch.ones(1, 191)},
            r"embedding: numbers \[1, 192\] are expected, float32 \[1, 191\]",
        ),
        ({"embedding": torch.ones(2, 192)}, r"float32 \[2, 192\] is given"),
        ({"embedding": [1.0] * 192}, "embedding: list is given, not a plain tensor"),
        ({"embedding": torch.full((1, 192), torch.nan)}, "embedding: NaN or infinite"),
        ({"embedding": torch.zeros(1, 192)}, "all zeros"),
        (whole() | {"flow_embedding": torch.ones(1, 192)}, "llm_embedding and flow_embedding must be equal"),
        (whole() | {"llm_prompt_speech_token": torch.zeros(1, 10).int()}, "speech_token must be equal"),
        (whole() | {"prompt_speech_feat": torch.full((1, 20, 80), torch.inf)}, "feat: NaN or infinite"),
        (whole() | {"prompt_speech_feat": torch.ones(1, 80, 20)}, r"numbers \[1, n, 80\] are expected"),
        (whole() | {"prompt_speech_feat_len": torch.tensor([99])}, "feat_len: a number from 0 to 20"),
        (whole() | {"prompt_text": torch.tensor([[5, 6, 320]])}, "prompt_text: ids from 0 to 319"),
        (whole() | {"prompt_text": torch.tensor([[0.5, 6, 7]])}, r"whole numbers \[1, n\] are expected"),
        (whole() | {"flow_prompt_speech_token": -torch.ones(1, 10).int()}, "ids from 0 to 6560"),
        (without("prompt_speech_feat"), "half there"),
        (without("llm_prompt_speech_token", "flow_prompt_speech_token"), "half there"),
        (whole(frames=21), "21 mel frames do not fit 10 speech tokens, which have 20"),
        (whole(tokens=751, frames=1502), "longer than 30 s"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(
    read: Callable[[object], dict[str, Speaker]], entry: object, message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{SPEAKERS}: the speaker 'me': .*{message}"):
        read({"good": whole(), "me": entry})


@pytest.mark.parametrize(
    "name", ["", "a" * 65, "a/b", "a\\b", "..", ".hidden", " a", "a\n", "a\u202eb", "a\x00", 7]
)
def test_a_name_that_clients_cannot_use_is_refused(
    read: Callable[[object], dict[str, Speaker]], name: object
) -> None:
    with pytest.raises(CheckpointError, match="no usable name.*1 to 64 printable"):
        read({name: whole()})


@pytest.mark.parametrize("name", ["中文女", "日语男", "Anna-Maria 2", "a" * 64, "Zoë"])
def test_usual_names_are_fine(read: Callable[[object], dict[str, Speaker]], name: str) -> None:
    assert list(read({name: whole()})) == [name]


def test_a_file_with_something_else_is_refused(read: Callable[[object], dict[str, Speaker]]) -> None:
    with pytest.raises(CheckpointError, match="holds list, not a mapping of names"):
        read([whole()])


def test_a_file_that_would_run_code_is_refused(read: Callable[[object], dict[str, Speaker]]) -> None:
    with pytest.raises(CheckpointError, match=r"spk2info\.pt: refused.*Nothing of it was run"):
        read({"me": Path("x")})
