"""The checkpoint writer: official keys and shapes at both sizes, and weights that can be heard."""

from __future__ import annotations

import lzma
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, FAMILIES, Family
from cosytriton_ensemble.sampling import RepetitionAwareSampler, seeded_uniform
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import ExportError
from cosytriton_export.flow import flow_of
from cosytriton_export.hyperyaml import Config, load_hyperyaml
from cosytriton_export.llm import language_model_of
from cosytriton_export.llm_base import LanguageModel
from cosytriton_export.llm_transformer import PromptEncoder, TransformerLM
from cosytriton_export.shapes import Shapes, state_shapes
from cosytriton_export.templates import SIZES, Size, config_text
from cosytriton_export.vocoder import vocoder_of
from cosytriton_export.writer import qwen_config, write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
STATES = ("llm", "flow", "hift")
TIED = "llm.model.lm_head.weight"  # the golden files leave it out

families = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("written") / "checkpoint", family=request.param)


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def official() -> Mapping[tuple[str, str], Shapes]:
    """Key -> shape of the official full-size files, by family and file."""
    shapes: dict[tuple[str, str], Shapes] = defaultdict(dict)
    for line in lzma.decompress((GOLDEN / "official_keys.tsv.xz").read_bytes()).decode().splitlines():
        family, name, key, shape = line.split("\t")
        shapes[family, name][key] = tuple(map(int, shape.split(",")))
    return shapes


def template(family: Family, size: Size, folder: Path) -> Config:
    path = folder / family.config_file
    path.write_text(config_text(family, SIZES[family.name][size]))
    return load_hyperyaml(path)


def golden_config(family: Family) -> Config:
    return load_hyperyaml(GOLDEN / family.config_file.replace(".yaml", "_tiny.yaml"))


@families
@pytest.mark.parametrize("name", STATES)
def test_full_size_has_the_official_keys_and_shapes(
    official: Mapping[tuple[str, str], Shapes], family: Family, name: str, tmp_path: Path
) -> None:
    qwen = qwen_config(SIZES[family.name]["full"])
    assert state_shapes(family, name, template(family, "full", tmp_path), qwen) == official[family.name, name]


@families
@pytest.mark.parametrize("name", STATES)
def test_shapes_follow_from_the_configuration_like_the_official_modules(
    golden: Callable[[str], Mapping[str, Any]], family: Family, name: str
) -> None:
    """The golden weights are complete official state dicts of other sizes."""
    qwen = qwen_config(SIZES[COSYVOICE2.name]["tiny"]) | {"vocab_size": 300}
    given = state_shapes(family, name, golden_config(family), qwen)
    given.pop(TIED, None)
    weights = golden(f"{name}_v{family.name[-1]}_weights")
    assert given == {key: value.shape for key, value in weights.items()}


@families
def test_the_configuration_has_the_keys_and_classes_of_the_official_one(
    family: Family, tmp_path: Path
) -> None:
    """The golden configurations are official ones with other sizes, and with what training needs."""
    given, wanted = template(family, "tiny", tmp_path), golden_config(family)
    parts = ("llm", "flow", "hift", "feat_extractor", "get_tokenizer")
    assert {part: structure(given[part]) for part in parts} == {
        part: structure(wanted[part]) for part in parts
    }


def structure(value: object) -> object:
    """Keys, classes and texts; numbers only by their type."""
    if isinstance(value, Config):
        return value.tag, {key: structure(child) for key, child in value.items()}
    return value if isinstance(value, str) else type(value)


def test_a_written_file_has_exactly_the_shapes(written: Checkpoint) -> None:
    qwen = qwen_config(SIZES[written.family.name]["tiny"])
    for name in STATES:
        state = torch.load(written.path / f"{name}.pt", weights_only=True)
        wanted = state_shapes(written.family, name, written.config, qwen)
        assert {key: tuple(value.shape) for key, value in state.items()} == wanted


def test_the_tied_embedding_is_written_once(tiny_checkpoint: Checkpoint) -> None:
    state = torch.load(tiny_checkpoint.path / "llm.pt", weights_only=True)
    assert state[TIED].data_ptr() == state["llm.model.model.embed_tokens.weight"].data_ptr()


def test_a_seed_gives_the_same_checkpoint_and_another_seed_another(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    same = write_checkpoint(tmp_path / "same", "tiny", seed=0)
    other = write_checkpoint(tmp_path / "other", "tiny", seed=1)
    wanted = tiny_checkpoint.state("flow")
    assert all(torch.equal(value, wanted[key]) for key, value in same.state("flow").items())
    assert not torch.equal(other.state("flow")["encoder_proj.weight"], wanted["encoder_proj.weight"])


def test_an_existing_directory_is_never_written_to(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="exists already"):
        write_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("torch.save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_checkpoint(tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_its_speech_is_finite_audible_and_not_clipped(written: Checkpoint) -> None:
    count = 50
    mel, frames = mel_of(written, count)
    assert mel.shape[1] == frames.item() == written.family.frames(count)
    waveform = waveform_of(written, mel, frames)
    assert waveform.numel() == written.family.samples(count)
    assert waveform.isfinite().all()
    assert 0.01 < waveform.square().mean().sqrt() < 0.5
    assert (waveform.abs() > 0.98).float().mean() < 0.05


def test_its_vocoder_does_not_amplify_noise(written: Checkpoint) -> None:
    """As a trained one: otherwise the error of 8 bits would say nothing."""
    vocoder = vocoder_of(written)
    generator = torch.Generator().manual_seed(0)
    mel, noise = (torch.randn(1, 80, 20, generator=generator) for _ in range(2))
    source = torch.zeros(1, 20 * written.family.mel_hop)
    wanted, given = (vocoder.decode(x, source, number(20)) for x in (mel - 5, mel - 5 + 0.05 * noise))
    assert (given - wanted).square().mean() < 0.01 * wanted.square().mean()


def number(value: int) -> Tensor:
    return torch.tensor([[value]], dtype=torch.int32)


def mel_of(checkpoint: Checkpoint, count: int) -> tuple[Tensor, Tensor]:
    """Random tokens in a random voice, without a reference."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(checkpoint.family.speech_codes, (1, count), generator=generator).int()
    speaker = torch.randn(1, 192, generator=generator)
    prompt = (torch.zeros(1, 25).int(), number(0), torch.zeros(1, 50, 80))
    if checkpoint.family is COSYVOICE1:
        rest: tuple[Tensor, ...] = (number(0), speaker, number(0), torch.zeros(1, 34, 80), number(0))
    else:
        rest = (speaker, torch.tensor([[False]]), torch.tensor([[True]]))
    mel, frames, *_ = flow_of(checkpoint)(tokens, number(count), *prompt, *rest)
    return mel, frames


def waveform_of(checkpoint: Checkpoint, mel: Tensor, frames: Tensor) -> Tensor:
    if checkpoint.family is COSYVOICE3:
        rest: tuple[Tensor, ...] = (torch.tensor([[True]]), number(0), torch.zeros(1, 1), number(-1))
    else:
        cache = torch.zeros(1, checkpoint.family.overlap_samples)
        rest = (cache, number(0), number(0), torch.zeros(1, 1), number(-1))
    waveform: Tensor = vocoder_of(checkpoint)(mel, frames, *rest)[0]
    return waveform


def test_its_language_model_ends_by_itself(written: Checkpoint) -> None:
    """Most utterances end between the least and the largest allowed length (2 and 20 per text token)."""
    model = language_model_of(written)
    lengths = np.array([spoken_length(model, text_length=10, seed=seed) for seed in range(8)])
    assert np.mean(lengths < 200) > 0.5, lengths
    assert lengths.max() > 20, lengths


def spoken_length(model: LanguageModel, text_length: int, seed: int) -> int:
    """Speak a random text; the number of tokens before the end."""
    text = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (1, text_length)))
    uniform, sampler, table = seeded_uniform(seed), RepetitionAwareSampler(), model.embedding_table()
    keys, values = model.empty_caches(1, 400), model.empty_caches(1, 400)
    new, past, spoken = prompt_of(model, text), 0, list[int]()
    while len(spoken) < 20 * text_length:
        _, logits, keys, values = model(new, torch.tensor([past], dtype=torch.int32), keys, values)
        scores = logits[0, -1].numpy().copy()
        if len(spoken) < 2 * text_length:
            scores[model.ids.eos_id] = -np.inf
        token = sampler.sample(scores, spoken, uniform)
        assert token < model.ids.speech_codes or token == model.ids.eos_id, "another stop id"
        if token == model.ids.eos_id:
            break
        spoken.append(token)
        past += new.shape[1]
        new = table[model.ids.speech_offset + token][None, None]
    return len(spoken)


def prompt_of(model: LanguageModel, text: Tensor) -> Tensor:
    table = model.embedding_table()
    if not isinstance(model, TransformerLM):
        return table[model.ids.prompt(text, text[:, :0])]
    encoded, speaker = PromptEncoder(model)(text, torch.ones(1, 192))
    sos, task = (table[number][None, None] for number in (model.ids.sos_id, model.ids.task_id))
    return torch.cat([sos, speaker, encoded, task], dim=1)


def test_the_buffers_of_the_file_have_their_true_values(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family=COSYVOICE3)
    buffer = checkpoint.state("flow")["decoder.estimator.rotary_embed.inv_freq"]
    torch.testing.assert_close(buffer, 10_000 ** (-torch.arange(0, 16, 2) / 16))
