"""The build: artifacts of a profile from the FP32 graphs of a repository, each model whole or as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from cosytriton_engines.calibration.sets import CalibrationSet
from cosytriton_engines.calibration.stream_feeds import StreamFeeds
from cosytriton_engines.engine.plans import PlanBuilder
from cosytriton_engines.engine.sources import TEXT_ENCODER
from cosytriton_engines.errors import BuildError
from cosytriton_engines.precision.attention import without_attention
from cosytriton_engines.precision.search import Journal
from cosytriton_engines.precision.surgery import EXTERNAL_DATA_BYTES, save
from cosytriton_engines.precision.variant import Feeds, Variant, Variants
from cosytriton_engines.quality.metrics import METRICS, limits
from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.manifest import Manifest, check_artifact, sha256
from cosytriton_ensemble.pipeline import Pipeline, pipeline_of
from cosytriton_ensemble.profiles import FP32_GRAPH, INT8_GRAPH, Profile, text_encoder_of
from cosytriton_ensemble.publishing import publish, staging
from cosytriton_ensemble.repository import check_repository, family_of, version_directory
from cosytriton_ensemble.spec import Stage

TOOLS = ("cosytriton", "numpy", "onnx", "onnx-ir", "onnxruntime")
JOURNALS = ".build"  # beside a model's version folder; Triton ignores its name
# ONNX Runtime maps weights that lie beside a graph, and drops those that it has packed: a fourth less memory
# for the flow of CosyVoice2.
MAPPED_BYTES = 64 << 20
METHOD = "3"  # counts changes of how a variant is found: what another one found or made is not believed

Progress = Callable[[str], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """One graph that was made: of a stage, of the language model, or its text encoder.

    Attributes:
        model: its name in the metrics.
        source: the FP32 graph.
        path: the graph in the other precision.
        variant: how it was found.
        calibration: the feeds that it was calibrated and judged with.

    """

    model: str
    source: Path
    path: Path
    variant: Variant
    calibration: Feeds

    def __str__(self) -> str:
        figures = ", ".join(m.title + " " + m.text(self.variant.figures[m.name]) for m in METRICS[self.model])
        return f"{self.model:<18} {self.path.name:<24} {figures}; {len(self.variant.kept)} layers kept"


class Build:
    """Builds one profile of a repository.

    Args:
        repository: exported, and complete.
        profile: what to build.
        calibration: a set of the repository's checkpoint.
        plans: builds TensorRT plans; None: their graphs alone, on a machine without a GPU.
        curve: measure the loss over layers kept beyond what the choice needs.

    Raises:
        BuildError: the profile serves what the export wrote.
        CosytritonError: repository and calibration set do not fit.

    """

    def __init__(
        self,
        repository: Path,
        profile: Profile,
        calibration: CalibrationSet,
        *,
        plans: PlanBuilder | None = None,
        curve: bool = False,
        progress: Progress = _log.info,
    ) -> None:
        if profile.graph == FP32_GRAPH:
            raise BuildError(
                f"The profile {profile.name} serves what the export wrote: there is nothing to build."
            )
        check_repository(repository)
        calibration.check(repository)
        self._repository, self._profile, self._calibration = repository, profile, calibration
        self._plans, self._curve, self._progress = plans, curve, progress
        self._pipeline: Pipeline = pipeline_of(family_of(repository))

    def models(self) -> list[str]:
        """The models that the profile has artifacts of its own for."""
        return models_of(self._pipeline, self._profile, plans=self._plans is not None)

    def run(self, models: Sequence[str] | None = None, again: bool = False) -> list[Built]:
        """Build the named models, or all; `again`: also what is there and fits.

        Raises:
            BuildError: a model is unknown, or no choice of layers keeps its quality.
            EngineError: TensorRT refuses.

        """
        names = self.models() if models is None else list(models)
        check_models(names, self.models())
        built: list[Built] = []
        for number, name in enumerate(names, 1):
            folder, plans = version_directory(self._repository, name), self._plans is not None
            files = [folder / file for file in _files(self._stage(name), self._profile, plans)]
            if not again and all(self._fits(file) for file in files):
                self._progress(f"[{number}/{len(names)}] {name}: up to date")
                continue
            self._progress(f"[{number}/{len(names)}] {name}")
            built += self._build(name, again)
        return built

    def _stage(self, name: str) -> Stage:
        return next(stage for stage in self._pipeline.graph_stages if stage.name == name)

    def _fits(self, artifact: Path) -> bool:
        """Whether an artifact is there and need not be built: made from the same, in the same way."""
        try:
            manifest = check_artifact(artifact)
        except RepositoryError:
            return False
        return manifest.calibration in (None, self._calibration.digest) and manifest.tools == _tools()

    def _build(self, name: str, again: bool) -> list[Built]:
        stage, folder = self._stage(name), version_directory(self._repository, name)
        built: list[Built] = []
        with staging(self._repository, [name]) as drafts:
            draft, graph = drafts[name], folder / self._profile.graph_of(stage)
            if stage.learned and (again or not self._fits(graph)):
                built = self._graphs(name, folder, draft)
                graph = draft / graph.name
                self._manifest(folder / FP32_GRAPH, draft, graph.name, built)
            if self._plans is not None and self._profile.plan is not None:
                feeds = {model: list(self._calibration.judging(model)) for model in self._models_of(folder)}
                self._plans.build(
                    self._profile, stage, self._pipeline, folder, graph, draft, feeds, self._progress
                )
            publish(draft, folder, self._stale(graph.name if built else None))
        return [replace(one, path=folder / one.path.name) for one in built]

    def _models_of(self, folder: Path) -> dict[str, str]:
        """The graphs of a model by their names in the calibration set: FP32 files."""
        files = {folder.parent.name: FP32_GRAPH, TEXT_ENCODER: text_encoder_of(FP32_GRAPH)}
        return {model: file for model, file in files.items() if (folder / file).is_file()}

    def _stale(self, graph: str | None) -> list[str]:
        """What an earlier build, of another family, may have left beside a new graph and a new plan."""
        encoder = text_encoder_of(graph) if graph else None
        graphs = [f"{graph}.data", encoder, f"{encoder}.data"] if graph and encoder else []
        plans = [text_encoder_of(self._profile.plan)] if self._profile.plan and self._plans else []
        return [*filter(None, graphs), *plans]

    def _graphs(self, name: str, folder: Path, draft: Path) -> list[Built]:
        """Write the variants of a model's graphs."""
        targets = {name: self._profile.graph, TEXT_ENCODER: text_encoder_of(self._profile.graph)}
        built = []
        for model, file in self._models_of(folder).items():
            source, cpu = folder / file, self._profile.graph == INT8_GRAPH
            journal, feeds = self._journal(folder, file, cpu), self._feeds(name, source)
            with TemporaryDirectory() as scratch:
                # TensorRT builds no Attention in the body of a loop; ONNX Runtime is fastest with it.
                graph = source if cpu else without_attention(source, Path(scratch))
                variants = Variants(model, graph, feeds, journal, self._progress, self._curve)
                variant = variants.make(self._profile)
            save(variant.model, draft / targets[model], MAPPED_BYTES if cpu else EXTERNAL_DATA_BYTES)
            built.append(Built(model, source, draft / targets[model], variant, feeds))
        return built

    def _feeds(self, name: str, source: Path) -> Feeds:
        streamed = name == self._pipeline.tts_stream.name
        return StreamFeeds(self._calibration, source) if streamed else self._calibration

    def _journal(self, folder: Path, file: str, cpu: bool) -> Journal:
        """Of one form of a graph: without Attention it has other values, and so other ranges."""
        identity = {
            "source": dict(Manifest.read(folder / FP32_GRAPH).files),  # and the weights that lie beside it
            "calibration": self._calibration.digest,
            "tools": _tools(),
        }
        return Journal(folder.parent / JOURNALS / ("cpu" if cpu else "gpu") / f"{file}.json", identity)

    def _manifest(self, source: Path, draft: Path, artifact: str, built: Sequence[Built]) -> None:
        origin, precision = Manifest.read(source), self._profile.precision
        figures = {key: value for one in built for key, value in one.variant.figures.items()}
        tolerance, better = limits((one.model for one in built), precision)
        Manifest(
            stage=origin.stage,
            artifact=artifact,
            files={file.name: sha256(file) for file in sorted(draft.iterdir())},
            checkpoint=origin.checkpoint,
            family=origin.family,
            untrained=origin.untrained,
            precision=precision,
            tools=_tools(),
            source=origin.files,
            calibration=self._calibration.digest,
            opset=built[0].variant.model.opset_imports[""],
            tolerance=tolerance,
            errors=figures,
            better=better,
            kept={layer: reason for one in built for layer, reason in one.variant.kept.items()},
        ).write(draft)


def models_of(pipeline: Pipeline, profile: Profile, *, plans: bool) -> list[str]:
    """The models that a build of a profile, with `plans` or without, makes something of."""
    stages = [stage for stage in pipeline.graph_stages if profile.serves(stage)]
    return [stage.name for stage in stages if _files(stage, profile, plans)]


def check_models(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise `BuildError` unless all names are known."""
    if unknown := [name for name in names if name not in known]:
        raise BuildError(f"unknown models {', '.join(unknown)}; known are {', '.join(known)}.")


def _files(stage: Stage, profile: Profile, plans: bool) -> list[str]:
    """What a build makes of a stage: a graph, a plan, or both."""
    graph = [profile.graph_of(stage)] if stage.learned else []
    return [*graph, *([profile.plan] if profile.plan and plans else [])]


def _tools() -> dict[str, str]:
    return {tool: version(tool) for tool in TOOLS} | {"method": METHOD}
