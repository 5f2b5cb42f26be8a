"""The flow of Fun-CosyVoice3: no encoder but a lookahead over the tokens, and a diffusion transformer.

CosyVoice 3, arXiv 2505.17589.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from cosytriton_export.flow.dit import DiT
from cosytriton_export.flow.encoder import PreLookahead
from cosytriton_export.flow.flow import CausalFlow
from cosytriton_export.flow.masks import length_mask


class CausalDiTFlow(CausalFlow):
    """Official class `CausalMaskedDiffWithDiT`."""

    def __init__(self, config: Mapping[str, Any], lookahead: PreLookahead, estimator: DiT) -> None:
        super().__init__(config, estimator)
        self.pre_lookahead_layer = lookahead

    @classmethod
    def build(cls, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Self:  # noqa: ARG003
        """Make the modules; the configuration has all sizes."""
        layer, sizes = config["pre_lookahead_layer"], config["decoder"]["estimator"]
        estimator = DiT(
            sizes["mel_dim"],
            sizes["out_channels"],
            sizes["dim"],
            sizes["depth"],
            sizes["heads"],
            sizes["dim_head"],
            sizes["ff_mult"],
        )
        lookahead = PreLookahead(layer["in_channels"], layer["channels"], layer["pre_lookahead_len"])
        return cls(config, lookahead, estimator)

    def encode(
        self,
        ids: Tensor,
        given: Tensor,
        count: Tensor,  # noqa: ARG002
        streaming: Tensor,  # noqa: ARG002
    ) -> Tensor:
        """Token ids [B, S] to their embeddings, once a frame, [B, M, stride * S]; no mask matters here."""
        # Zero beyond the end is the padding that the lookahead of a complete sentence expects.
        embedded = self.embed(ids) * length_mask(given, ids.shape[1])[..., None]
        heard: Tensor = self.pre_lookahead_layer(embedded)
        return heard.repeat_interleave(self.stride, dim=1).transpose(1, 2)
