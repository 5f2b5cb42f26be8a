"""PyTorch eager: what the official code computes, with the weights of the same checkpoint.

The native stages are the modules that the graphs were exported from; they keep the official structure, and
the solver runs ten steps in Python. The language model is Hugging Face's where that is installed, see
`official_lm`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosytriton_bench.measure import Stopwatch, timed
from cosytriton_bench.torch_lm import ExportedLM, TorchLM, logits_of
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.exporter import MODULES

Ids = Sequence[int]

_log = logging.getLogger(__name__)


class Eager:
    """All stages of a checkpoint in PyTorch; each is loaded when it is first used."""

    def __init__(self, checkpoint: Path, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._checkpoint = Checkpoint.open(checkpoint)
        pipeline = pipeline_of(self._checkpoint.family)
        self._inputs = {stage.name: [t.name for t in stage.inputs] for stage in pipeline.native_stages}
        self._module = lru_cache(self._load)

    @cached_property
    def _lm(self) -> TorchLM:
        if find_spec("transformers") is None:
            _log.warning("without transformers, PyTorch runs a lighter language model; see --official")
            return ExportedLM(self._checkpoint)
        from cosytriton_bench.official_lm import OfficialLM

        return OfficialLM(self._checkpoint)

    def _load(self, stage: str) -> nn.Module:
        return MODULES[stage](self._checkpoint).eval()

    def about(self) -> str:
        """What the baseline is."""
        return f"PyTorch {torch.__version__} eager, {torch.get_num_threads()} threads; {self._lm.about}"

    # ---- answers, to be compared with the graphs --------------------------------------------------------

    def outputs(self, stage: str, feed: Feed) -> list[Array]:
        """Run a native stage."""
        tensors = (torch.from_numpy(feed[name]) for name in self._inputs[stage])
        return [output.numpy() for output in self._module(stage)(*tensors)]

    def logits(self, prompt: Ids, fed: Ids) -> Array:
        """Logits [1 + fed, speech rows] behind a prompt, and behind each id that is fed after it."""
        return logits_of(self._lm, prompt, fed)

    # ---- times ------------------------------------------------------------------------------------------

    def stage(self, stage: str, feed: Feed) -> Stopwatch:
        """Time a native stage."""
        self._module(stage)
        with timed() as watch:
            self.outputs(stage, feed)
        return watch

    def prefill(self, prompt: Ids) -> Stopwatch:
        """Time the language model on a prompt."""
        ids = torch.tensor([prompt])
        with timed() as watch:
            self._lm.run(ids)
        return watch

    def decode(self, rows: int, positions: Ids, steps: int) -> Stopwatch:
        """Time a step that feeds one id to each row: the mean over `steps` behind each of `positions`."""
        total, ids = Stopwatch(), torch.full((rows, 1), self._lm.text_rows)
        for past in positions:
            cache: Any = self._lm.cache(rows, past)
            with timed() as watch:
                for _ in range(steps):
                    _, cache = self._lm.run(ids, cache)
            total.seconds += watch.seconds
            total.cpu += watch.cpu
        count = len(positions) * steps
        return Stopwatch(total.seconds / count, total.cpu / count)

    def speech(self, positions: int, tokens: int, flow: Feed, vocoder: Feed) -> Stopwatch:
        """Time a request from the language model's prompt to the sound, official sampling in it."""
        self._module("flow"), self._module("vocoder")
        prompt = self._lm.sample_prompt(positions)
        with timed() as watch:
            self._lm.speak(prompt, tokens)
            self.outputs("flow", flow)
            self.outputs("vocoder", vocoder)
        return watch
