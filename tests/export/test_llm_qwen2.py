"""What the weights and the configuration of a language model on Qwen2 must have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cosytriton_export.errors import CheckpointError
from cosytriton_export.llm_base import Decoding
from cosytriton_export.llm_qwen2 import CosyVoice3LM, Qwen2LM
from cosytriton_export.qwen2 import Qwen2Config

SAMPLING = {"top_p": 0.8, "top_k": 25, "win_size": 10, "tau_r": 0.1}
QWEN_CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
ROWS = 20  # of the speech table


@pytest.mark.parametrize(("build", "special"), [(Qwen2LM, 3), (CosyVoice3LM, 4)])
def test_a_speech_table_needs_rows_behind_the_codes(build: type[Qwen2LM], special: int) -> None:
    def load(codes: int) -> Qwen2LM:
        ids = build.id_space(30, codes, ROWS)
        config = {"speech_token_size": codes, "sampling": SAMPLING}
        made = build(Qwen2Config.from_json(QWEN_CONFIG), ids, Decoding.from_config(config))
        return build.from_state(QWEN_CONFIG, config, made.state_dict(), "llm.pt")

    model = load(ROWS - special)
    assert model.ids.fill_id == ROWS - 1
    with pytest.raises(CheckpointError, match=f"speech_token_size is {ROWS - special + 1}"):
        load(ROWS - special + 1)


@pytest.mark.parametrize("build", [Qwen2LM, CosyVoice3LM])
def test_missing_tables_are_named(build: type[Qwen2LM]) -> None:
    config = {"speech_token_size": 17, "sampling": SAMPLING}
    with pytest.raises(CheckpointError, match=r"missing keys: .*embed_tokens\.weight"):
        build.from_state(QWEN_CONFIG, config, {"speech_embedding.weight": torch.zeros(ROWS, 8)}, "llm.pt")


def test_the_mix_ratio_is_the_official_one_if_the_yaml_says_nothing() -> None:
    assert Decoding.from_config({"sampling": SAMPLING}).mix_ratio == (5, 15)
    assert Decoding.from_config({"sampling": SAMPLING, "mix_ratio": [4, 12]}).mix_ratio == (4, 12)


@pytest.mark.parametrize("ratio", [5, [5], [5, 0], [5.0, 15]])
def test_a_mix_ratio_that_is_no_pair_of_counts_is_refused(ratio: object) -> None:
    with pytest.raises(CheckpointError, match="mix_ratio"):
        Decoding.from_config({"sampling": SAMPLING, "mix_ratio": ratio})


def test_qwen_config_without_a_size_is_refused() -> None:
    config = {name: size for name, size in QWEN_CONFIG.items() if name != "rope_theta"}
    with pytest.raises(CheckpointError, match="rope_theta"):
        Qwen2Config.from_json(config)


def test_qwen_config_with_heads_that_do_not_divide_the_width_is_refused() -> None:
    with pytest.raises(CheckpointError, match="multiple"):
        Qwen2Config.from_json(QWEN_CONFIG | {"num_attention_heads": 5})
