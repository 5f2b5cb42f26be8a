"""Conditional flow matching: Euler's method from fixed noise to mel, with classifier-free guidance.

Matcha-TTS, arXiv 2309.03199; guidance and cosine schedule of CosyVoice, arXiv 2407.05407.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from cosytriton_export.flow.history import History

STEPS = 10
NOISE_FRAMES = 15_000  # 300 s, the longest mel
NOISE_SEED = 0


def fixed_noise(mel_bins: int) -> Tensor:
    """Noise that every request starts from; returns [1, mel_bins, NOISE_FRAMES].

    It is fixed, so that a frame starts from the same noise in each chunk of a stream.
    """
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return torch.randn((1, mel_bins, NOISE_FRAMES), generator=generator)


def cosine_schedule() -> tuple[Tensor, Tensor]:
    """Compute the times of the velocity and the step after each; both float32 [STEPS].

    The times are dense near 0. They are accumulated in float32 like the official solver does.
    """
    ends = 1 - torch.cos(torch.linspace(0, 1, STEPS + 1) * 0.5 * math.pi)
    time, step = ends[0], ends[1] - ends[0]
    times, steps = [time], [step]
    for end in ends[2:]:
        time = time + step
        step = end - time
        times.append(time)
        steps.append(step)
    return torch.stack(times), torch.stack(steps)


class Estimator(Protocol):
    """The network that the solver asks for the velocity; every family has its own."""

    def embed_time(self, times: Tensor) -> Tensor:
        """What the estimator needs to know of times [STEPS]: [STEPS, time width]."""

    def __call__(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        """Velocity [B, M, T]: x [B, 4M, T] of state, mu, speaker and prompt, time [1, time width], bias."""


class ResumableEstimator(Estimator, Protocol):
    """An estimator that can go on where it ended."""

    def estimate(self, x: Tensor, time: Tensor, history: History) -> Tensor:
        """Velocity [B, T, M] behind a history: x [B, T, 4M], time [1, time width]."""


class ConditionalFlow(nn.Module):
    """The ODE solver around the estimator."""

    noise: Tensor
    times: Tensor
    steps: Tensor
    embedded_times: Tensor | None

    def __init__(self, estimator: Estimator, mel_bins: int, guidance: float) -> None:
        super().__init__()
        self.estimator = estimator
        self.guidance = guidance
        times, steps = cosine_schedule()
        self.register_buffer("noise", fixed_noise(mel_bins), persistent=False)
        self.register_buffer("times", times, persistent=False)
        self.register_buffer("steps", steps, persistent=False)
        self.register_buffer("embedded_times", None, persistent=False)

    @torch.no_grad()
    def fix_times(self) -> None:
        """Embed the times once and for all, when the weights are the final ones.

        The layers that embed them, 43 % of the weights in CosyVoice 3, then stay out of the exported graph.
        """
        self.embedded_times = self.estimator.embed_time(self.times)

    def time_table(self) -> Tensor:
        """What the estimator needs to know of the times, [STEPS, time width]."""
        fixed = self.embedded_times
        return self.estimator.embed_time(self.times) if fixed is None else fixed

    def velocity(self, x: Tensor, conditions: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        """Guide the velocity away from the unconditional one.

        x [B, M, T]; conditions [2B, C, T] and bias [2B, 1, T, T] hold the conditional rows, then the
        unconditional ones; time [1, time width]. Returns [B, M, T].
        """
        doubled = torch.cat((torch.cat((x, x)), conditions), dim=1)
        return self.guide(self.estimator(doubled, time, bias))

    def guide(self, velocity: Tensor) -> Tensor:
        """Lead the conditional rows, the first half of [2B, ...], away from the others; returns [B, ...]."""
        rows = velocity.shape[0] // 2
        return (1 + self.guidance) * velocity[:rows] - self.guidance * velocity[rows:]

    def forward(
        self, mu: Tensor, speaker: Tensor, prompt: Tensor, bias: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """Solve.

        Args:
            mu: encoder output [B, M, T].
            speaker: projected speaker embedding [B, M].
            prompt: mel of the reference, zero after it, [B, M, T].
            bias: additive attention mask [B, 1, T, T].
            noise: where to start, [B, M, T]; the head of the fixed noise if not given.

        The mel is [B, M, T].
        """
        conditions = torch.cat((mu, speaker[..., None].expand_as(mu), prompt), dim=1)
        conditions = torch.cat((conditions, torch.zeros_like(conditions)))  # [2B, 3M, T]
        bias = torch.cat((bias, bias))
        times = self.time_table()
        if noise is None:
            frame = torch.arange(mu.shape[2], device=mu.device)
            noise = self.noise.index_select(2, frame).repeat(mu.shape[0], 1, 1)

        def euler(index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            row = index.reshape(1)
            velocity = self.velocity(x, conditions, times.index_select(0, row), bias)
            return index + 1, x + self.steps.index_select(0, row) * velocity

        index = torch.zeros((), dtype=torch.int64)
        if torch.compiler.is_exporting():
            # One ONNX Loop, so that the graph holds the estimator once and not ten times.
            loop: Callable[..., tuple[Tensor, Tensor]] = torch.while_loop
            return loop(lambda index, _: index < STEPS, euler, (index, noise))[1]
        x = noise
        for _ in range(STEPS):
            index, x = euler(index, x)
        return x
