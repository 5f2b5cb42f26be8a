"""The flow for streams: only the frames behind those that a state is kept of.

Under the block mask no later token changes an earlier frame (CosyVoice 2, arXiv 2412.10117). The state is
what the attention layers read and the last frames that the convolutions read, in every Euler step; keys and
values, four times as large, are projected from it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from cosytriton_export.flow.flow import CausalFlow, join_rows
from cosytriton_export.flow.history import Beginning, Resumed
from cosytriton_export.flow.masks import HIDDEN
from cosytriton_export.flow.solver import STEPS, ResumableEstimator

ROWS = 2  # the conditional one and the unconditional one


@dataclass(frozen=True, slots=True)
class StateShape:
    """The sizes of a stream's state that do not depend on its length."""

    layers: int  # of attention
    width: int  # of what they read
    convolution: tuple[int, ...]  # numbers of each convolution

    def empty(self) -> tuple[list[Tensor], Tensor]:
        """The state before the first frame: FP32 [0, steps, 2, width] per layer, and [steps, 2, n]."""
        attention = [torch.zeros(0, STEPS, ROWS, self.width) for _ in range(self.layers)]
        return attention, torch.zeros(STEPS, ROWS, sum(self.convolution))


class _Measured(Beginning):
    """Counts what the state must hold."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(ROWS, 1, 1, 1))
        self.widths: list[int] = []
        self.numbers: list[int] = []

    def padded(self, x: Tensor, frames: int) -> Tensor:
        self.numbers.append(frames * x.shape[2])
        return super().padded(x, frames)

    def seen(self, x: Tensor) -> Tensor:
        self.widths.append(x.shape[2])
        return super().seen(x)


class StreamingFlow(nn.Module):
    """One stream's next frames, of CosyVoice 2 or 3."""

    def __init__(self, flow: CausalFlow) -> None:
        super().__init__()
        self.flow = flow
        self.state = self._measure()

    @torch.no_grad()
    def _measure(self) -> StateShape:
        solver, history = self.flow.decoder, _Measured()
        inputs = torch.zeros(ROWS, 1, 4 * solver.noise.shape[1])
        self._estimator.estimate(inputs, solver.time_table()[:1], history)
        return StateShape(len(history.widths), history.widths[0], tuple(history.numbers))

    @property
    def _estimator(self) -> ResumableEstimator:
        return cast(ResumableEstimator, self.flow.decoder.estimator)

    def resume(
        self, said: Sequence[Tensor], token_end: Tensor, attention: Sequence[Tensor], convolution: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Go on behind the frames that the state is of; `said` are the first six arguments of `forward`.

        Returns:
            The mel of the new frames [1, T, M]; the states of `forward`, with the steps in their places:
            [T, steps, 2, width] per layer, and [steps, 2, n].

        """
        frames = torch.arange(attention[0].shape[0], self.flow.stride * int(token_end))
        mel, added, convolution = self(*said, token_end, frames, attention, convolution)
        return mel, [state.permute(2, 0, 1, 3) for state in added], convolution

    def forward(
        self,
        tokens: Tensor,
        token_count: Tensor,
        prompt_tokens: Tensor,
        prompt_token_count: Tensor,
        prompt_mel: Tensor,
        speaker_embedding: Tensor,
        token_end: Tensor,
        frames: Tensor,
        attention: Sequence[Tensor],
        convolution: Tensor,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Speak.

        Args:
            tokens: speech tokens, int32 [1, N], padded on the right.
            token_count: int32 [1, 1].
            prompt_tokens: tokens of the reference, int32 [1, P], padded on the right.
            prompt_token_count: int32 [1, 1], 0 without a reference.
            prompt_mel: mel of the reference [1, F, M].
            speaker_embedding: as the speaker encoder gives it, [1, speaker width].
            token_end: tokens, with the reference's, that get frames, int32 [1, 1]; those behind are heard.
            frames: their frames behind the state, int64 [T]; the first one begins a block.
            attention: what each attention layer read of earlier frames, [past, steps, 2, width] each.
            convolution: the last frames that the convolutions read, zeros at first, [steps, 2, n].

        Returns:
            The mel [1, T, M]; the attentions' state of these frames, [steps, 2, T, width] each (while it
            is exported that of the last step, [2, T, width]: see `streaming_graph`); the convolutions' state
            (or of the last step).

        """
        flow = self.flow
        prompt_count, given, end = (
            prompt_token_count.long(),
            prompt_token_count + token_count,
            token_end.long(),
        )
        ids = join_rows(prompt_tokens.long(), prompt_count, tokens.long())
        mu = flow.encode(ids, given, end, torch.ones_like(end, dtype=torch.bool))
        prompt = flow.prompt(prompt_mel, prompt_count * flow.stride, mu.shape[2])
        speaker = flow.speaker(speaker_embedding)[:, None].expand(1, frames.shape[0], -1)
        at_hand = [x.index_select(2, frames).mT for x in (mu, prompt, flow.decoder.noise)]
        conditions = torch.cat((at_hand[0], speaker, at_hand[1]), dim=2)  # [1, T, 3M]
        return self._solve(at_hand[2], conditions, self._bias(frames, attention[0]), attention, convolution)

    def _bias(self, frames: Tensor, past: Tensor) -> Tensor:
        """Additive mask [1, 1, T, past + T] that hides the blocks behind each frame's own."""
        block = self.flow.block
        key = torch.arange(past.shape[0] + frames.shape[0], device=frames.device)
        hidden = key >= (frames - frames % block + block)[:, None]
        return hidden.to(torch.float32)[None, None] * HIDDEN

    def _solve(
        self,
        noise: Tensor,
        conditions: Tensor,
        bias: Tensor,
        attention: Sequence[Tensor],
        convolution: Tensor,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Euler's method from noise [1, T, M], under conditions [1, T, 3M]; as `forward`."""
        solver, times = self.flow.decoder, self.flow.decoder.time_table()
        conditions = torch.cat((conditions, torch.zeros_like(conditions)))

        def euler(index: Tensor, x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
            row = index.reshape(1)
            before = [state.index_select(1, row).squeeze(1) for state in attention]
            read = torch.split(
                convolution.index_select(0, row).squeeze(0), list(self.state.convolution), dim=1
            )
            history = Resumed(bias, before, read)
            doubled = torch.cat((torch.cat((x, x)), conditions), dim=2)
            velocity = self._estimator.estimate(doubled, times.index_select(0, row), history)
            x = x + solver.steps.index_select(0, row) * solver.guide(velocity)
            return index + 1, x, *history.attention, history.convolution

        layers, width = self.state.layers, self.state.width
        unread = [noise.new_zeros(ROWS, noise.shape[1], width) for _ in range(layers)]
        carried = (torch.zeros((), dtype=torch.int64), noise, *unread, torch.zeros_like(convolution[0]))
        if torch.compiler.is_exporting():
            loop: Callable[..., tuple[Tensor, ...]] = torch.while_loop
            _, mel, *added, last = loop(lambda index, *_: index < STEPS, euler, carried)
            return mel, added, last
        steps = [carried]
        for _ in range(STEPS):
            steps.append(euler(*steps[-1]))
        _, mels, *states = (list(values) for values in zip(*steps[1:], strict=True))
        *added, last = (torch.stack(state) for state in states)
        return mels[-1], added, last
