"""The optimization profiles of an engine: for which input shapes TensorRT chooses its kernels.

An engine has one profile or several. Each admits every shape between its smallest and its largest one, and is
tuned for one in between; Triton runs a batch in the fitting profile whose tuned shape is nearest.
"""

from __future__ import annotations

from collections.abc import Mapping

from cosytriton_ensemble.pipeline import Pipeline
from cosytriton_ensemble.spec import Dim, Size, Stage

SIZES: tuple[Size, ...] = ("min", "opt", "max")

Shapes = Mapping[str, Mapping[Size, tuple[int, ...]]]
"""One optimization profile: input name -> smallest, tuned and largest shape."""


def split(stage: Stage, pipeline: Pipeline) -> tuple[Shapes, ...]:
    """The profiles of a native stage; the first one admits every size that is served.

    A stage that speaks is called chunk by chunk while somebody listens. Kernels that are tuned for the usual
    five seconds, and must hold a minute, are not the best for the second of speech that decides how soon the
    first sound is heard: such a stage gets another profile, tuned for a first chunk and ending at the usual
    size. The encoders of a voice run once for it, on a whole recording: one profile.
    """
    whole = stage.profile()
    family, tokens = pipeline.family, pipeline.family.hop_tokens + pipeline.family.lookahead
    chunk = {pipeline.tokens.name: tokens, pipeline.frames.name: family.frames(tokens)}
    if not any(isinstance(dim, Dim) and dim.name in chunk for t in stage.inputs for dim in t.dims):
        return (whole,)
    short = {t.name: _shortened(whole[t.name], t.dims, chunk) for t in stage.inputs}
    return whole, short


def _shortened(
    whole: Mapping[Size, tuple[int, ...]], dims: tuple[int | Dim, ...], chunk: Mapping[str, int]
) -> dict[Size, tuple[int, ...]]:
    """The shapes of one input, with the batch; a chunk's dimension is tuned for it as it is padded."""
    small, usual, large = (list(whole[size]) for size in SIZES)
    for axis, dim in enumerate(dims, 1):
        if isinstance(dim, Dim) and dim.name in chunk:
            usual[axis], large[axis] = min(dim.padded(chunk[dim.name]), dim.opt), dim.opt
    return {"min": tuple(small), "opt": tuple(usual), "max": tuple(large)}
