"""Parity of the streaming flow's graph, run as a server does, with the flow that computes all at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cosytriton_ensemble import names
from cosytriton_ensemble.pipeline import Pipeline
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.streaming import GridChunks
from cosytriton_ensemble.streaming_flow import StreamingFlow
from cosytriton_export.errors import ExportError
from cosytriton_export.flow.flow import CausalFlow
from cosytriton_export.parity import Errors, stage_feeds, stage_reference

_PLENTY = 1 << 40  # bytes of state


def measure_streaming_flow(flow: CausalFlow, pipeline: Pipeline, path: Path, tolerance: float) -> Errors:
    """Speak chunk by chunk with the graph at `path`, and at once with `flow` under the block mask.

    Raises `ExportError` when an error is beyond `tolerance`.
    """
    graph = StreamingFlow.open(path, pipeline.family, device="cpu", threads=0, budget=_PLENTY)
    whole = stage_reference(pipeline.flow, flow)
    errors: Errors = {}
    for (size, rows), feed in stage_feeds(pipeline.flow).items():
        if rows > 1:
            continue  # a stream has one
        always = {names.STREAMING: np.array([[True]]), names.FINALIZE: np.array([[True]])}
        mel, count = whole(feed | always)
        wanted, given = mel[0, : count.item()], _spoken(graph, feed, pipeline)
        error = float(np.abs(wanted - given).max() / max(1.0, np.abs(wanted).max()))
        if not error <= tolerance:
            raise ExportError(
                f"{path}: the mel of a stream at size {size!r} differs from PyTorch's by {error:.2e}, "
                f"allowed is {tolerance:.0e}."
            )
        errors[size, rows] = error
    return errors


def _spoken(graph: StreamingFlow, feed: Feed, pipeline: Pipeline) -> Array:
    tokens = feed[names.TOKENS][0, : feed[names.TOKEN_COUNT].item()].tolist()
    chunks = GridChunks(pipeline.family, feed[names.PROMPT_TOKEN_COUNT].item(), streamed=True)
    made: list[Array] = []
    with graph.stream({name: array[0] for name, array in feed.items()}) as stream:
        while call := chunks.next_call(len(tokens), ended=True):
            mel = stream.mel(tokens, call)
            assert mel is not None
            made.append(mel)
    return np.concatenate(made)
