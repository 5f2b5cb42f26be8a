"""The export: a checkpoint becomes the artifacts of a model repository, all of them or none.

Every graph is written to a staging folder beside its place, compared with its PyTorch module there, and
moved only after the last stage has passed. A manifest beside each artifact says what it was made from.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
from torch import nn

from cosytriton_ensemble.errors import CosytritonError
from cosytriton_ensemble.manifest import Manifest, digests
from cosytriton_ensemble.pipeline import Pipeline, pipeline_of
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.publishing import publish, staging
from cosytriton_ensemble.registry import speakers_file
from cosytriton_ensemble.repository import artifacts, version_directory
from cosytriton_ensemble.voice import Voice
from cosytriton_export.audio_tokenizer import AudioTokenizer
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.environment import prepare_torch
from cosytriton_export.errors import ExportError
from cosytriton_export.features import PromptMel
from cosytriton_export.flow import flow_of
from cosytriton_export.flow.flow import CausalFlow
from cosytriton_export.flow.streaming_graph import export_streaming_flow
from cosytriton_export.graph import OPSET as FLOW_OPSET
from cosytriton_export.graph import export_stage
from cosytriton_export.llm import language_model_of
from cosytriton_export.llm_graph import OPSET as LLM_OPSET
from cosytriton_export.llm_graph import TEXT_ENCODER, export_llm
from cosytriton_export.parity import ID_TIES, ParityRow, measure, stage_feeds, stage_reference
from cosytriton_export.parity_flow import measure_streaming_flow
from cosytriton_export.parity_llm import measure_llm
from cosytriton_export.speaker_embedding import SpeakerEmbedding
from cosytriton_export.speakers import read_speakers
from cosytriton_export.tokenizer import build_tokenizer, save_tokenizer
from cosytriton_export.vocoder import vocoder_of

OPSET = 18  # that the runtimes of older containers know too
TOOLS = ("torch", "onnx", "onnxruntime", "tokenizers")

Progress = Callable[[str], None]
_log = logging.getLogger(__name__)

MODULES: Mapping[str, Callable[[Checkpoint], nn.Module]] = {
    "speaker_embedding": SpeakerEmbedding.from_checkpoint,
    "audio_tokenizer": AudioTokenizer.from_checkpoint,
    "prompt_mel": PromptMel.from_checkpoint,
    "flow": flow_of,
    "vocoder": vocoder_of,
}
"""Builders of the native stages; each one knows the families."""

_SLOW = ("tts_stream", "flow", "speaker_embedding", "vocoder")


def export_checkpoint(
    checkpoint: Checkpoint,
    repository: Path,
    stages: Sequence[str] | None = None,
    progress: Progress = _log.info,
    workers: int = 1,
) -> list[ParityRow]:
    """Export the checkpoint into the model repository.

    Args:
        checkpoint: what to export.
        repository: receives `<stage>/1/<artifact>` and its manifest; old ones are replaced only when all of
            `stages` have passed.
        stages: names of the models to export; all if not given.
        progress: called with a line for each finished stage.
        workers: how many stages are exported at a time, each in a process of its own if more than one.

    Returns:
        A row per stage, with the errors against PyTorch.

    Raises:
        CheckpointError: a file of the checkpoint is damaged or does not fit the others.
        ExportError: a stage is unknown, cannot be exported, or is outside its tolerance.

    """
    files = artifacts(pipeline_of(checkpoint.family))
    names = list(files) if stages is None else list(dict.fromkeys(stages))
    unknown = [name for name in names if name not in files]
    if unknown:
        raise ExportError(f"unknown stages {', '.join(unknown)}; known are {', '.join(files)}.")
    with staging(repository, names) as drafts:
        paths = {name: drafts[name] / files[name] for name in names}
        rows: dict[str, ParityRow] = {}
        for row in _rows(checkpoint, paths, workers):
            _write_manifest(checkpoint, row, paths[row.stage])
            rows[row.stage] = row
            progress(f"[{len(rows)}/{len(names)}] {row.stage}")
        for name in names:
            _publish(drafts[name], version_directory(repository, name))
    return [rows[name] for name in names]


def _rows(checkpoint: Checkpoint, paths: Mapping[str, Path], workers: int) -> Iterator[ParityRow]:
    """Export each stage, in the order in which they get finished."""
    if workers == 1:
        yield from (_export(checkpoint, name, path) for name, path in paths.items())
        return
    # Tracing is a single thread of Python, so stages gain from processes; the longest begin.
    names = sorted(paths, key=lambda name: name not in _SLOW)
    context, threads = multiprocessing.get_context("spawn"), max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, context, _start_worker, (threads,)) as pool:
        jobs = [pool.submit(_export_in_worker, checkpoint, name, paths[name]) for name in names]
        try:
            yield from (job.result() for job in as_completed(jobs))
        finally:
            pool.shutdown(cancel_futures=True)  # the first failure ends the export


def _start_worker(threads: int) -> None:
    prepare_torch()
    torch.set_num_threads(threads)
    gc.disable()  # a trace is millions of objects that stay: looking for garbage takes a tenth of the time


def _export_in_worker(checkpoint: Checkpoint, name: str, path: Path) -> ParityRow:
    try:
        return _export(checkpoint, name, path)
    finally:
        gc.collect()  # the stage's weights, before the next ones are loaded


def _export(checkpoint: Checkpoint, name: str, path: Path) -> ParityRow:
    """Write one artifact to `path` and measure it."""
    pipeline = pipeline_of(checkpoint.family)
    try:
        if name == pipeline.text_frontend.name:
            save_tokenizer(build_tokenizer(checkpoint), path)
            return ParityRow(name, None, _megabytes(path), 0, {})
        if name == pipeline.tts.name:
            path.write_bytes(_speakers(checkpoint))
            return ParityRow(name, None, _megabytes(path), 0, {})
        if name == pipeline.speech_lm.name:
            return _export_language_model(checkpoint, pipeline, path)
        if name == pipeline.tts_stream.name:
            return _export_streaming_flow(checkpoint, pipeline, path)
        return _export_stage(checkpoint, pipeline, name, path)
    except (CosytritonError, OSError, MemoryError):
        raise
    except Exception as error:  # whatever a module makes of a configuration with impossible values
        raise ExportError(
            f"{checkpoint.path}: the stage {name!r} cannot be built from this configuration and "
            f"these weights ({type(error).__name__}: {error})."
        ) from error


def _export_language_model(checkpoint: Checkpoint, pipeline: Pipeline, path: Path) -> ParityRow:
    model, tolerance = language_model_of(checkpoint), pipeline.speech_lm.tolerance
    export_llm(model, path)
    errors = measure_llm(model, path, tolerance)
    return ParityRow(pipeline.speech_lm.name, LLM_OPSET, _megabytes(path), tolerance, errors)


def _export_streaming_flow(checkpoint: Checkpoint, pipeline: Pipeline, path: Path) -> ParityRow:
    flow, tolerance = cast(CausalFlow, flow_of(checkpoint)), pipeline.flow.tolerance
    export_streaming_flow(flow, path)
    errors = measure_streaming_flow(flow, pipeline, path, tolerance)
    return ParityRow(pipeline.tts_stream.name, FLOW_OPSET, _megabytes(path), tolerance, errors)


def _export_stage(checkpoint: Checkpoint, pipeline: Pipeline, name: str, path: Path) -> ParityRow:
    stage = next(stage for stage in pipeline.native_stages if stage.name == name)
    module = MODULES[name](checkpoint).eval()
    opset = FLOW_OPSET if stage is pipeline.flow else OPSET
    export_stage(stage, module, path, opset=opset)
    errors = measure(path, stage_reference(stage, module), stage_feeds(stage), stage.tolerance)
    return ParityRow(name, opset, _megabytes(path), stage.tolerance, errors)


def _speakers(checkpoint: Checkpoint) -> bytes:
    """The checkpoint's own voices, as the server reads them."""
    speakers = read_speakers(checkpoint)
    if not speakers:
        return speakers_file({})  # without a tokenizer, which takes a second to build
    tokenizer = build_tokenizer(checkpoint)
    return speakers_file(
        {
            name: Voice(
                speaker.embedding,
                speaker.prompt_tokens,
                speaker.prompt_mel,
                tokenizer.decode(speaker.prompt_text_ids.tolist(), skip_special_tokens=False),
            )
            for name, speaker in speakers.items()
        }
    )


def _megabytes(path: Path) -> float:
    return sum(file.stat().st_size for file in path.parent.iterdir()) / 1e6


def _publish(draft: Path, place: Path) -> None:
    """Replace a model, with what the old one may have had beside it and this one has not."""
    weights = (f"{graph}.data" for graph in (FP32_GRAPH, TEXT_ENCODER))
    publish(draft, place, stale=(TEXT_ENCODER, *weights))


def _write_manifest(checkpoint: Checkpoint, row: ParityRow, path: Path) -> None:
    errors = {f"{size}, {batch} rows": error for (size, batch), error in row.errors.items()}
    Manifest(
        stage=row.stage,
        artifact=path.name,
        files=digests(path.parent),
        checkpoint=checkpoint.digest,
        family=checkpoint.family.name,
        untrained=checkpoint.untrained,
        precision="fp32",
        tools={tool: version(tool) for tool in TOOLS},
        opset=row.opset,
        tolerance=dict.fromkeys(errors, row.tolerance or ID_TIES),
        errors=errors,
    ).write(path.parent)
