"""HyperPyYAML is read as data: sizes and references come out, code never runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosytriton_export.errors import CheckpointError
from cosytriton_export.hyperyaml import Config, load_hyperyaml

GOLDEN = Path(__file__).parents[1] / "golden"


def parse(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_hyperyaml(path)


def test_the_official_file_gives_plain_sizes() -> None:
    config = load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml")
    assert config["flow"]["encoder"]["static_chunk_size"] == 25  # !ref <chunk_size>
    assert config["flow"]["decoder"]["estimator"]["static_chunk_size"] == 50  # !ref <a> * <b>
    assert config["flow"]["decoder"]["cfm_params"]["content"]["sigma_min"] == 1e-6
    assert config["hift"]["upsample_rates"] == [8, 5, 3]
    assert config["flow"].tag == "!new:cosyvoice.flow.flow.CausalMaskedDiffWithXvec"
    assert config["data_pipeline"][0].tag == "!name:cosyvoice.dataset.processor.parquet_opener"


@pytest.mark.parametrize(
    ("name", "model", "rate", "hop"),
    [
        ("cosyvoice", "TransformerLM", 22_050, 256),
        ("cosyvoice2", "Qwen2LM", 24_000, 480),
        ("cosyvoice3", "CosyVoice3LM", 24_000, 480),
    ],
)
def test_the_files_of_all_families_can_be_read(name: str, model: str, rate: int, hop: int) -> None:
    config = load_hyperyaml(GOLDEN / f"{name}_tiny.yaml")
    assert config["llm"].tag == f"!new:cosyvoice.llm.llm.{model}"
    assert config["hift"]["sampling_rate"] == rate  # !ref <sample_rate>
    assert config["feat_extractor"]["hop_size"] == hop
    assert config["llm"]["sampling"]["top_p"] == 0.8


def test_a_construct_is_data_and_is_never_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    config = parse(tmp_path, f"x: !apply:os.system ['touch {victim}']\ny: !new:pathlib.Path\n  z: 1")
    assert config["x"].tag == "!apply:os.system"
    assert config["x"].arguments == (f"touch {victim}",)
    assert config["y"] == {"z": 1}
    assert not victim.exists()


def test_references_may_point_forwards_and_be_products_of_numbers(tmp_path: Path) -> None:
    config = parse(tmp_path, "a: !ref <b> * <c> + 1\nb: !ref <c>\nc: 1e-3\nd: [!ref <b>]")
    assert config["a"] == pytest.approx(1.000001)
    assert config["d"] == [1e-3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: !!python/object/apply:os.system ['touch VICTIM']",
            r"line 1: the construct .*os\.system' is unknown",
        ),
        ("b: 1\na: !include:other.yaml", "line 2: the construct '!include:other.yaml' is unknown"),
        ("a: !ref <b>", "<b> refers to a key that does not exist"),
        ("a: !ref <b>\nb: !ref <a>", "refers to itself"),
        ("a: !ref __import__('os').system('touch VICTIM')", "neither one <key> nor sums and products"),
        ("a: !ref <b> ** <b>\nb: 99999999", "neither one <key> nor sums and products"),
        ("a: !ref <b> * 2\nb: text", "'text' is no number"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: 1\na: 2", "line 2: the key 'a' is repeated"),
        ("1: a", "the key 1 is no text"),
        ("a: " + "[" * 1000, "nested deeper than 50"),
        ("a: [1", "line 1"),
        ("a: \x01", "is no valid YAML"),
        ("- 1", "holds no mapping"),
        ("", "holds no mapping"),
    ],
)
def test_a_bad_file_is_refused_and_says_why(tmp_path: Path, text: str, message: str) -> None:
    victim = tmp_path / "victim"
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(tmp_path, text.replace("VICTIM", str(victim)))
    assert "config.yaml" in str(caught.value)
    assert not victim.exists()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="UTF-8"):
        load_hyperyaml(path)


def test_a_missing_key_names_its_place_and_the_keys_that_are_there(tmp_path: Path) -> None:
    config = parse(tmp_path, "flow:\n  width: 1")
    with pytest.raises(
        CheckpointError, match=r"config\.yaml, flow: there is no key 'depth'; given are \['width'\]"
    ):
        config["flow"]["depth"]
