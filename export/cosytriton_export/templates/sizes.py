"""Sizes that differ between an official and a tiny checkpoint; all others are the official ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3
from cosytriton_export.campplus import CamPPlusSizes
from cosytriton_export.speech_tokenizer import SpeechTokenizerSizes

Size = Literal["tiny", "full"]

# v1's text tokenizer, Whisper's, belongs to no checkpoint: even a tiny embedding has all its rows.
WHISPER_ROWS = 51_866


@dataclass(frozen=True)
class Transformer:
    """A stack of attention and feed-forward layers."""

    width: int
    layers: int
    heads: int
    inner: int  # of the feed-forward layers


@dataclass(frozen=True)
class TextEncoder(Transformer):
    """v1's encoder of text."""

    input_width: int


@dataclass(frozen=True)
class Qwen(Transformer):
    """The language model of v2 and v3."""

    key_heads: int


@dataclass(frozen=True)
class UNet:
    """The flow's estimator in v1 and v2."""

    width: int
    heads: int
    head_width: int
    blocks: int  # transformer blocks of a stage
    mid_stages: int


@dataclass(frozen=True)
class DiT:
    """The flow's estimator in v3, and the look-ahead before it."""

    width: int
    layers: int
    heads: int
    head_width: int
    lookahead_width: int


@dataclass(frozen=True)
class Vocoder:
    """The vocoder of all families."""

    width: int
    f0_width: int


@dataclass(frozen=True)
class Sizes:
    """What all families have."""

    text_rows: int
    llm: Transformer
    hift: Vocoder
    campplus: CamPPlusSizes
    speech_tokenizer: SpeechTokenizerSizes


@dataclass(frozen=True)
class Sizes1(Sizes):
    """CosyVoice 1."""

    text_encoder: TextEncoder
    encoder: Transformer
    unet: UNet


@dataclass(frozen=True)
class Sizes2(Sizes):
    """CosyVoice 2."""

    llm: Qwen
    encoder: Transformer
    unet: UNet


@dataclass(frozen=True)
class Sizes3(Sizes):
    """CosyVoice 3."""

    llm: Qwen
    dit: DiT


_TINY_ENCODER = Transformer(width=64, layers=1, heads=4, inner=128)
_TINY_QWEN = Qwen(width=64, layers=2, heads=4, inner=160, key_heads=2)
_TINY_UNET = UNet(width=32, heads=4, head_width=16, blocks=1, mid_stages=1)  # each takes time to trace
_TINY_HIFT = Vocoder(width=32, f0_width=32)
_TINY_CAMPPLUS = CamPPlusSizes(head_channels=8, initial=16, growth=4, bottleneck=8, layers=(3, 4, 3))

_FULL_ENCODER = Transformer(width=512, layers=6, heads=8, inner=2048)
_FULL_QWEN = Qwen(width=896, layers=24, heads=14, inner=4864, key_heads=2)
_FULL_UNET = UNet(width=256, heads=8, head_width=64, blocks=4, mid_stages=12)
_FULL_HIFT = Vocoder(width=512, f0_width=512)
_QWEN_ROWS = 151_936

SIZES: Mapping[str, Mapping[Size, Sizes]] = {
    COSYVOICE1.name: {
        "tiny": Sizes1(
            text_rows=WHISPER_ROWS,
            text_encoder=TextEncoder(width=64, layers=2, heads=4, inner=128, input_width=64),
            llm=Transformer(width=64, layers=3, heads=4, inner=128),
            encoder=_TINY_ENCODER,
            unet=_TINY_UNET,
            hift=_TINY_HIFT,
            campplus=_TINY_CAMPPLUS,
            speech_tokenizer=SpeechTokenizerSizes(version=1, width=64, layers=2, inner=128),
        ),
        "full": Sizes1(
            text_rows=WHISPER_ROWS,
            text_encoder=TextEncoder(width=1024, layers=6, heads=16, inner=4096, input_width=512),
            llm=Transformer(width=1024, layers=14, heads=16, inner=4096),
            encoder=_FULL_ENCODER,
            unet=_FULL_UNET,
            hift=_FULL_HIFT,
            campplus=CamPPlusSizes(),
            speech_tokenizer=SpeechTokenizerSizes(version=1),
        ),
    },
    COSYVOICE2.name: {
        "tiny": Sizes2(
            text_rows=320,
            llm=_TINY_QWEN,
            encoder=_TINY_ENCODER,
            unet=_TINY_UNET,
            hift=_TINY_HIFT,
            campplus=_TINY_CAMPPLUS,
            speech_tokenizer=SpeechTokenizerSizes(version=2, width=64, layers=2, inner=128),
        ),
        "full": Sizes2(
            text_rows=_QWEN_ROWS,
            llm=_FULL_QWEN,
            encoder=_FULL_ENCODER,
            unet=_FULL_UNET,
            hift=_FULL_HIFT,
            campplus=CamPPlusSizes(),
            speech_tokenizer=SpeechTokenizerSizes(version=2),
        ),
    },
    COSYVOICE3.name: {
        "tiny": Sizes3(
            text_rows=640,
            llm=_TINY_QWEN,
            dit=DiT(width=64, layers=2, heads=4, head_width=16, lookahead_width=96),
            hift=_TINY_HIFT,
            campplus=_TINY_CAMPPLUS,
            speech_tokenizer=SpeechTokenizerSizes(version=3, width=64, layers=2, inner=128),
        ),
        "full": Sizes3(
            text_rows=_QWEN_ROWS,
            llm=_FULL_QWEN,
            dit=DiT(width=1024, layers=22, heads=16, head_width=64, lookahead_width=1024),
            hift=_FULL_HIFT,
            campplus=CamPPlusSizes(),
            speech_tokenizer=SpeechTokenizerSizes(version=3, layers=12),
        ),
    },
}
