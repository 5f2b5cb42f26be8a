"""The flow of CosyVoice 2: a conformer encoder and a causal U-Net (arXiv 2412.10117)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from cosytriton_export.errors import CheckpointError
from cosytriton_export.flow.causal_unet import CausalConditionalDecoder
from cosytriton_export.flow.encoder import UpsampleConformerEncoder
from cosytriton_export.flow.flow import CausalFlow


class CausalUNetFlow(CausalFlow):
    """Official class `CausalMaskedDiffWithXvec`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        encoder: UpsampleConformerEncoder,
        estimator: CausalConditionalDecoder,
    ) -> None:
        super().__init__(config, estimator)
        self.encoder = encoder
        self.encoder_proj = nn.Linear(config["encoder"]["output_size"], config["output_size"])

    @classmethod
    def build(cls, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Self:
        """Make the modules; `CheckpointError` when the U-Net would change its rate."""
        return cls(config, _encoder(config, _up_layers(state)), _estimator(config["decoder"]["estimator"]))

    def encode(self, ids: Tensor, given: Tensor, count: Tensor, streaming: Tensor) -> Tensor:
        """Token ids [B, S] to the encoder's mel estimate [B, M, stride * S]."""
        mu: Tensor = self.encoder_proj(self.encoder(self.embed(ids), given, count, streaming))
        return mu.transpose(1, 2)


def _encoder(config: Mapping[str, Any], up_layers: int) -> UpsampleConformerEncoder:
    sizes = config["encoder"]
    return UpsampleConformerEncoder(
        sizes["input_size"],
        sizes["output_size"],
        sizes["attention_heads"],
        sizes["linear_units"],
        sizes["num_blocks"],
        up_layers,
        config["pre_lookahead_len"],
        config["token_mel_ratio"],
        sizes["static_chunk_size"],
    )


def _estimator(sizes: Mapping[str, Any]) -> CausalConditionalDecoder:
    if len(sizes["channels"]) != 1:
        raise CheckpointError(
            f"the estimator has channels {sizes['channels']}; only one width is supported, as in CosyVoice 2."
        )
    return CausalConditionalDecoder(
        sizes["in_channels"],
        sizes["out_channels"],
        sizes["channels"][0],
        sizes["num_heads"],
        sizes["attention_head_dim"],
        sizes["n_blocks"],
        sizes["num_mid_blocks"],
    )


def _up_layers(state: Mapping[str, Tensor]) -> int:
    # The configuration has no key for the layers after upsampling.
    matches = (re.match(r"encoder\.up_encoders\.(\d+)\.", key) for key in state)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)
