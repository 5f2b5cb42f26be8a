"""The encoder of CosyVoice 1: a conformer without convolution modules at one rate.

CosyVoice, arXiv 2407.05407; the layers are those of the upsampling encoder.
"""

from __future__ import annotations

from torch import Tensor, nn

from cosytriton_export.flow.encoder import ConformerLayer, Embedding, relative_positions


class ConformerEncoder(nn.Module):
    """Token embeddings to hidden tokens; every token sees the whole row."""

    def __init__(self, inputs: int, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = Embedding(inputs, width)
        self.encoders = nn.ModuleList(ConformerLayer(width, heads, hidden) for _ in range(layers))
        self.after_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Encode: x [B, S, inputs], additive attention mask [B, 1, 1 or S, S] -> [B, S, width]."""
        x = self.embed(x)
        positions = relative_positions(x.shape[1], x.shape[2], x.device)
        for layer in self.encoders:
            x = layer(x, positions, bias)
        out: Tensor = self.after_norm(x)
        return out
