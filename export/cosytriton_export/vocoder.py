"""The vocoder of a checkpoint, whatever its family."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE3, Family
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.hift import HiftConfig, Vocoder
from cosytriton_export.hift_causal import CausalVocoder, uniform_noise
from cosytriton_export.hift_source import (
    HarmonicSource,
    between_centres,
    initial_phases,
    normal_noise,
    staircase,
    summed_over_samples,
)
from cosytriton_export.weights import load_weights


def vocoder_of(checkpoint: Checkpoint) -> Vocoder | CausalVocoder:
    """Load the vocoder of a checkpoint.

    Raises:
        CheckpointError: the weights do not fit the yaml, or the yaml not the family.

    """
    config, family = HiftConfig.from_yaml(checkpoint.config["hift"]), checkpoint.family
    rates = config.source.sample_rate, config.source.mel_hop
    if rates != (family.sample_rate, family.mel_hop):
        raise CheckpointError(
            f"{checkpoint.path}: the vocoder gives {rates[0]} Hz with {rates[1]} samples per mel frame, "
            f"{family.name} has {family.sample_rate} Hz and {family.mel_hop}."
        )
    if family.name == COSYVOICE3.name:
        noise = uniform_noise(checkpoint.config["flow"], config.source)
    else:
        noise = normal_noise(config.source.harmonics)
    vocoder = build_vocoder(family, config, checkpoint.state("hift"), "hift.pt", noise)
    if isinstance(vocoder, CausalVocoder) and vocoder.context > family.context_frames:
        raise CheckpointError(
            f"{checkpoint.path}: a sample of the vocoder depends on {vocoder.context} earlier mel frames; a "
            f"stream of {family.name} gives it {family.context_frames}. Use the official kernel sizes."
        )
    return vocoder


def build_vocoder(
    family: Family,
    config: HiftConfig,
    weights: Mapping[str, Tensor],
    origin: str,
    noise: Tensor,
    initial_phase: Tensor | None = None,
) -> Vocoder | CausalVocoder:
    """Build the vocoder of a family from its parts, ready to infer.

    Args:
        family: decides the class and how the phase runs.
        config: the sizes.
        weights: under official keys, weight norm folded.
        origin: what the weights are, for the message.
        noise: what the harmonics hear, FP32 [positions, harmonics], repeated after the last position.
        initial_phase: of the harmonics in CosyVoice 1, cycles, FP32 [harmonics]; `initial_phases` by default.

    Raises:
        CheckpointError: names the keys that do not fit.

    """
    vocoder: Vocoder | CausalVocoder
    if family.name == COSYVOICE3.name:
        vocoder = CausalVocoder(config, HarmonicSource(config.source, staircase), config.look_ahead)
    elif family.name == COSYVOICE1.name:
        phase = initial_phases(config.source.harmonics) if initial_phase is None else initial_phase
        vocoder = Vocoder(config, HarmonicSource(config.source, summed_over_samples, phase))
    else:
        vocoder = Vocoder(config, HarmonicSource(config.source, between_centres))
    load_weights(vocoder, weights, origin)
    vocoder.m_source.mix_noise(noise)
    return vocoder.eval()
