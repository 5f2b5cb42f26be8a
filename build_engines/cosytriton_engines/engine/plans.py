"""TensorRT plans of a repository: built for this machine's GPU, compared with FP32, with their manifests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from cosytriton_engines.engine.builder import EngineError, EngineOptions, Progress, build_plan, tensorrt
from cosytriton_engines.engine.device import cuda_runtime
from cosytriton_engines.engine.language_model_plan import LanguageModelPlan
from cosytriton_engines.engine.plan import PlanRunner
from cosytriton_engines.engine.sources import TEXT_ENCODER, source_of
from cosytriton_engines.quality.evaluate import Figures, Graph, failures, measure_outputs, rows_with_news
from cosytriton_engines.quality.metrics import limits
from cosytriton_ensemble.machine import Machine
from cosytriton_ensemble.manifest import Manifest, sha256
from cosytriton_ensemble.pipeline import Pipeline
from cosytriton_ensemble.profiles import FP32_GRAPH, Precision, Profile, text_encoder_of
from cosytriton_ensemble.spec import Feed, Stage


@dataclass(frozen=True, slots=True)
class PlanBuilder:
    """Builds the plans of one machine.

    Attributes:
        machine: whose GPU and TensorRT the plans are for.
        trt, cuda: the modules `tensorrt` and `cuda.bindings.runtime`.
        options: how engines are built.

    """

    machine: Machine
    trt: Any
    cuda: Any
    options: EngineOptions

    @classmethod
    def here(cls, options: EngineOptions) -> Self:
        """The builder of this machine; `EngineError` where it has no GPU or no TensorRT."""
        machine = Machine.here()
        if machine.gpu is None:
            raise EngineError(
                "A TensorRT plan is built on the GPU that it will run on, and this machine has none. Build "
                "the graphs here with --graphs, and the plans with the same command on the target."
            )
        return cls(machine, tensorrt(), cuda_runtime(), options)

    def build(
        self,
        profile: Profile,
        stage: Stage,
        pipeline: Pipeline,
        folder: Path,
        graph: Path,
        draft: Path,
        feeds: dict[str, list[Feed]],
        progress: Progress,
    ) -> None:
        """Build the plan of a stage into `draft`, with its manifest.

        Args:
            profile: names the plan.
            stage: what is built.
            pipeline: whose stage it is.
            folder: where the stage's FP32 graph lies.
            graph: what the plan is built from, its manifest and its text encoder beside it.
            draft: a folder for the result.
            feeds: what the plan is judged on, by the model's name in the calibration set.
            progress: takes a line for each phase.

        Raises:
            EngineError: TensorRT refuses, or the plan is not as good as its graph must be.

        """
        assert profile.plan is not None
        origin = Manifest.read(graph)
        precision: Precision = origin.precision if stage.learned else "fp16"  # FP32 may become TF32 on a GPU
        figures: Figures = {}
        written = []
        parts = _parts(stage, graph, profile.plan)
        for model, names in parts.items():
            source, plan = graph.with_name(names[0]), draft / names[1]
            reference = folder / (FP32_GRAPH if model != TEXT_ENCODER else text_encoder_of(FP32_GRAPH))
            with tempfile.TemporaryDirectory(dir=draft) as copies:
                taken = source_of(model, source, pipeline, Path(copies))
                build_plan(
                    taken.graph, taken.profiles, plan, trt=self.trt, options=self.options, progress=progress
                )
                found = measure_outputs(model, self._pairs(reference, source, plan, feeds[model]))
            if wrong := failures(model, precision, found):
                raise EngineError(f"{plan.name} of {model} is not as good as its graph: {'; '.join(wrong)}.")
            figures |= found
            written.append(plan)
        tolerance, better = limits(parts, precision)
        replace(
            origin,
            artifact=profile.plan,
            files={plan.name: sha256(plan) for plan in written},
            source=origin.files,
            tolerance=tolerance,
            errors=figures,
            better=better,
            tensorrt=self.machine.tensorrt,
            gpu=self.machine.gpu,
            portable="version" if self.options.version_compatible else "",
        ).write(draft)

    def _pairs(
        self, reference: Path, graph: Path, plan: Path, feeds: list[Feed]
    ) -> Iterator[tuple[Feed, Feed]]:
        """The outputs of FP32 and of the plan for each feed."""
        fp32 = Graph(reference)
        how: dict[str, Any] = {"trt": self.trt, "cuda": self.cuda}
        how["version_compatible"] = self.options.version_compatible
        if any("past_counts" in feed for feed in feeds):
            with LanguageModelPlan(plan, graph, **how) as running:
                for feed in feeds:
                    if not feed["past_counts"].any():  # a plan's caches are its own: it begins with a prompt
                        yield fp32(feed), rows_with_news(feed, _prompts(running, feed))
            return
        with PlanRunner(plan, **how) as runner:
            for feed in feeds:
                yield fp32(feed), runner.run(feed)


def _parts(stage: Stage, graph: Path, plan: str) -> dict[str, tuple[str, str]]:
    """Model -> its graph and its plan: the language model of CosyVoice 1 has a text encoder beside it."""
    encoder = text_encoder_of(graph.name)
    beside = {TEXT_ENCODER: (encoder, text_encoder_of(plan))} if graph.with_name(encoder).is_file() else {}
    return {stage.name: (graph.name, plan)} | beside


def _prompts(running: LanguageModelPlan, feed: Feed) -> Feed:
    """The logits behind each row's prompt, one row at a time: all but the last id at once, then a step."""
    logits = []
    for row, count in enumerate(feed["new_counts"].tolist()):
        running.fit(count, 1)
        running.clear(0)
        for first, last in ((0, count - 1), (count - 1, count)):
            if last > first:
                part = (slice(row, row + 1), slice(first, last))
                embeddings = feed["embeddings"][part] if "embeddings" in feed else None
                past, new = np.array([first], np.int32), np.array([last - first], np.int32)
                found = running.run(slice(0, 1), feed["input_ids"][part], past, new, embeddings)
        logits.append(found.copy())
    return {"logits": np.concatenate(logits)}
