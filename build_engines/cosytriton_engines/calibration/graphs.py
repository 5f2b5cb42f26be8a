"""FP32 graphs of a repository, run on ONNX Runtime in this process, and what they were fed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from cosytriton_ensemble.onnx_session import open_session, session_options
from cosytriton_ensemble.profiles import FP32_GRAPH
from cosytriton_ensemble.repository import version_directory
from cosytriton_ensemble.spec import Array, Feed, Stage

# Rows of one feed after the other, again and again. Whoever takes every second feed still gets rows alone and
# together, and chunks of a stream that begin and that continue.
BATCHES = (2, 1, 1, 2)

Keep = Callable[[str, Feed], None]
"""Stores a feed of a model."""


def open_graph(path: Path) -> ort.InferenceSession:
    """A session on the CPU."""
    return open_session(path, session_options())


class Tapped:
    """A session that keeps what it is fed."""

    def __init__(self, session: ort.InferenceSession, model: str, keep: Keep) -> None:
        self._session, self._model, self._keep = session, model, keep

    def run(self, names: list[str] | None, feed: Feed) -> list[Array]:
        """See `onnxruntime.InferenceSession.run`."""
        self._keep(self._model, feed)
        outputs: list[Array] = self._session.run(names, feed)
        return outputs


class Stages:
    """The native stages of a repository, each opened when it is first called."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._rows: dict[str, list[Feed]] = {}

    def call(self, stage: Stage, feed: Feed) -> Feed:
        """Run a feed without batch dimension, and keep it; outputs by name, without batch dimension."""
        self.keep(stage, feed)
        if stage.name not in self._sessions:
            graph = version_directory(self._repository, stage.name) / FP32_GRAPH
            self._sessions[stage.name] = open_graph(graph)
        names = [tensor.name for tensor in stage.outputs]
        outputs = self._sessions[stage.name].run(names, {k: v[None] for k, v in _of(stage, feed).items()})
        return {name: output[0] for name, output in zip(names, outputs, strict=True)}

    def keep(self, stage: Stage, feed: Feed) -> None:
        """Keep a feed, without batch dimension, that is not run."""
        self._rows.setdefault(stage.name, []).append(_of(stage, feed))

    def release(self) -> None:
        """Close the sessions: a full-size one takes up to 1.5 GB."""
        self._sessions.clear()

    def feeds(self) -> Iterator[tuple[str, Feed]]:
        """What was kept, as (stage name, feed with batch dimension); rows come alone and with others."""
        for name, rows in self._rows.items():
            sizes, start = cycle(BATCHES), 0
            while start < len(rows):
                size = next(sizes)
                yield name, stacked(rows[start : start + size])
                start += size


def stacked(rows: Sequence[Feed]) -> Feed:
    """Rows [...] as one batch [rows, ...]; the shorter ones are padded with zeros, as their counts tell."""
    return {name: _stacked([row[name] for row in rows]) for name in rows[0]}


def _stacked(arrays: Sequence[Array]) -> Array:
    shape = np.max([array.shape for array in arrays], axis=0)
    batch: Any = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return np.asarray(batch)


def _of(stage: Stage, feed: Feed) -> Feed:
    return {tensor.name: feed[tensor.name] for tensor in stage.inputs}
