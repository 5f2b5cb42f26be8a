"""Strips of a mel or a spectrum: FP32, a variant, and their difference, as small inline PNG images."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cosytriton_engines.quality.distances import DECIBELS_PER_NEPER, FLOOR, Array, spectrum
from cosytriton_engines.report.markup import Markup, element
from cosytriton_ensemble import names

FRAMES = 400  # of a strip: 8 s of mel, 4 s of spectrum
BANDS = 128  # of a spectrum: four of its bins each
RANGE_DB = 80.0  # below the loudest; darker is not shown
DIFFERENCE_DB = 12.0  # and more have the brightest colour of a difference

_COLOURS = ((8, 10, 38), (44, 32, 112), (122, 44, 128), (196, 72, 96), (244, 136, 60), (252, 240, 168))


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """What FP32 and a variant made of one feed: levels in dB, [frames, bands] each, low bands first."""

    what: str
    reference: npt.NDArray[np.float32]
    variant: npt.NDArray[np.float32]


def picture_of(model: str, reference: Mapping[str, Array], variant: Mapping[str, Array]) -> Picture | None:
    """The beginning of the first row of the outputs of one feed; None for a model without sound."""
    if model == "flow":
        frames = min(int(reference[names.FRAME_COUNT].flat[0]), FRAMES)
        pair = (DECIBELS_PER_NEPER * outputs[names.MEL][0, :frames] for outputs in (reference, variant))
        return Picture("mel", *(levels.astype(np.float32) for levels in pair))
    if model == "vocoder":
        samples = int(reference[names.SAMPLE_COUNT].flat[0])
        return Picture("spectrum", *(_levels(o[names.WAVEFORM][0, :samples]) for o in (reference, variant)))
    return None


def _levels(waveform: Array) -> npt.NDArray[np.float32]:
    amplitudes = spectrum(waveform)[:FRAMES, 1:]
    bands = amplitudes.reshape(len(amplitudes), BANDS, -1).max(axis=2)
    return np.asarray(20 * np.log10(np.maximum(bands, FLOOR**2)), np.float32)


def strip(picture: Picture) -> Markup:
    """The three images below each other, with their scales in words."""
    top = float(picture.reference.max())
    difference = np.abs(picture.variant - picture.reference)
    heard = np.maximum(picture.reference, picture.variant) > top - RANGE_DB
    images = (
        ("FP32", picture.reference, top - RANGE_DB, top),
        ("variant", picture.variant, top - RANGE_DB, top),
        ("difference", np.where(heard, difference, 0), 0.0, DIFFERENCE_DB),
    )
    title = (
        f"{picture.what} of one calibration feed: {RANGE_DB:g} dB range, difference 0 to {DIFFERENCE_DB:g} dB"
    )
    shown = (
        element(
            "div",
            element("span", name),
            element("img", src=png(levels, low, high), alt=f"{picture.what}, {name}", class_="strip"),
        )
        for name, levels, low, high in images
    )
    return element("figure", element("figcaption", title), *shown, class_="strips")


def png(levels: npt.NDArray[np.float32], low: float, high: float) -> str:
    """A data URI of levels [frames, bands]: time goes right, bands go up, `low` is dark and `high` bright."""
    scaled = np.nan_to_num((levels.T[::-1] - low) / (high - low), nan=1.0, posinf=1.0, neginf=0.0)
    indices = np.rint(255 * np.clip(scaled, 0, 1)).astype(np.uint8)
    height, width = indices.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), indices], axis=1)  # 0: no filter of the line
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits of a palette
    chunks = (
        (b"IHDR", header),
        (b"PLTE", _palette()),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in chunks)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _palette() -> bytes:
    """256 colours between the anchors; lightness grows all the way, so it reads without hue too."""
    anchors = np.linspace(0, 255, len(_COLOURS))
    channels = [np.interp(np.arange(256), anchors, channel) for channel in zip(*_COLOURS, strict=True)]
    return bytes(np.rint(np.stack(channels, axis=1)).astype(np.uint8))
