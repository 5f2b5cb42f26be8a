"""CAM++ read from a checkpoint's `campplus.onnx`, by structure.

Exporters name initializers as they like and fold a batch norm into the convolution before it. So the
convolutions and batch norms are walked in execution order, sizes are derived from them, and the module
that results is compared with the original graph on random input before anyone may use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx
import torch
from torch import Tensor

from cosytriton_export.campplus import CamPPlus, CamPPlusSizes
from cosytriton_export.errors import ExportError
from cosytriton_export.onnx_reader import GraphReader, attribute, run_original
from cosytriton_export.weights import load_weights

SOURCE = "campplus.onnx"
MAX_DEVIATION = 1e-3
"""Largest deviation from the original graph, relative to its largest output."""

_EPSILON = 1e-5  # of the module's batch norms
_POINTWISE = ("BatchNormalization", "Relu", "Mul")  # what may stand between two convolutions
_TAIL = 3  # at most: output norm, dense convolution, its norm
_TRIAL_FRAMES = 431  # three segments after the stride, the last one partial


def read_campplus(model: onnx.ModelProto) -> CamPPlus:
    """Build the module from the graph, in evaluation mode.

    Raises:
        ExportError: the graph is not CAM++; the message says what was not understood.
    """
    reader = GraphReader(model, SOURCE)
    walk = _Walk(reader)
    sizes = walk.read()
    module = CamPPlus(sizes).eval()
    # torch counts training steps in each batch norm; a graph has no such thing.
    counters = {k: v for k, v in module.state_dict().items() if k.endswith("num_batches_tracked")}
    load_weights(module, walk.state | counters, SOURCE)
    _verify(module, model)
    return module


def _verify(module: CamPPlus, model: onnx.ModelProto) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, _TRIAL_FRAMES, 80, generator=generator)
    expected = torch.from_numpy(run_original(model, SOURCE, (features.numpy(),)))
    with torch.inference_mode():
        given = module(features, torch.tensor([[_TRIAL_FRAMES]], dtype=torch.int32))
    deviation = (given - expected).abs().max() / expected.abs().max()
    if not deviation <= MAX_DEVIATION:
        raise ExportError(
            f"{SOURCE}: the network read from it deviates by {deviation:.2g} (relative) from the file's own "
            f"output, {MAX_DEVIATION:g} is allowed. Its structure differs from CAM++ somewhere."
        )


@dataclass
class _Walk:
    """Takes convolutions and batch norms one after the other and files them under the official keys."""

    reader: GraphReader
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = ("Conv", "BatchNormalization")
        self._nodes = [node for node in self.reader.nodes if node.op_type in kinds]
        self._next = 0

    def read(self) -> CamPPlusSizes:
        """Read all weights into `state`; returns the sizes that they have."""
        head_channels, head_blocks = self._head()
        initial = self._conv_norm("xvector.tdnn.linear", "xvector.tdnn.nonlinear.batchnorm", stride=2).shape[
            0
        ]
        layers: list[int] = []
        dilations: list[int] = []
        bias = None
        while len(self._nodes) - self._next > _TAIL:
            depth, dilation = self._block(f"xvector.block{len(layers) + 1}")
            layers.append(depth)
            dilations.append(dilation)
            bias = self._transit(f"xvector.transit{len(layers)}")
        embedding = self._tail(bias)
        if not layers:
            raise self.reader.error("it has no dense block.")
        first = "xvector.block1.tdnnd1"
        return CamPPlusSizes(
            embedding=embedding,
            head_channels=head_channels,
            head_blocks=head_blocks,
            initial=initial,
            growth=self.state[f"{first}.cam_layer.linear_local.weight"].shape[0],
            bottleneck=self.state[f"{first}.linear1.weight"].shape[0],
            layers=tuple(layers),
            dilations=tuple(dilations),
            segment=self._segment(),
        )

    def _head(self) -> tuple[int, tuple[int, ...]]:
        count = sum(node.op_type == "Conv" and self.reader.weight(node, 1).dim() == 4 for node in self._nodes)
        channels = self._conv_norm("head.conv1", "head.bn1").shape[0]
        blocks: list[int] = []
        taken = 1
        while taken < count - 1:
            strided = self._strides(self._peek())[0] > 1
            if strided or not blocks:
                blocks.append(0)
            key = f"head.layer{len(blocks)}.{blocks[-1]}"
            self._conv_norm(f"{key}.conv1", f"{key}.bn1", stride=2 if strided else 1)
            self._conv_norm(f"{key}.conv2", f"{key}.bn2")
            if strided:
                self._conv_norm(f"{key}.shortcut.0", f"{key}.shortcut.1", stride=2)
            blocks[-1] += 1
            taken += 3 if strided else 2
        self._conv_norm("head.conv2", "head.bn2", stride=2)
        return channels, tuple(blocks)

    def _block(self, key: str) -> tuple[int, int]:
        depth, dilation = 0, 1
        while self._at_dense_layer():
            depth += 1
            layer = f"{key}.tdnnd{depth}"
            self._norm(f"{layer}.nonlinear1.batchnorm", self._take("BatchNormalization"))
            self._conv_norm(f"{layer}.linear1", f"{layer}.nonlinear2.batchnorm")
            dilation = self._context_masking(f"{layer}.cam_layer")
        return depth, dilation

    def _at_dense_layer(self) -> bool:
        # A dense layer's narrow convolution feeds a wide one, a transit's does not.
        following = self._nodes[self._next + 1 : self._next + 2]
        return bool(following) and self._feeds_wide(following[0])

    def _feeds_wide(self, node: onnx.NodeProto) -> bool:
        consumers = self.reader.consumers(node)
        if any(c.op_type == "Conv" and self.reader.weight(c, 1).shape[-1] > 1 for c in consumers):
            return True
        return any(self._feeds_wide(c) for c in consumers if c.op_type in _POINTWISE)

    def _context_masking(self, key: str) -> int:
        """The local convolution and the two of its gate, whichever comes first; returns the dilation."""
        convs = [self._take("Conv") for _ in range(3)]
        wide = [node for node in convs if self.reader.weight(node, 1).shape[-1] > 1]
        if len(wide) != 1:
            raise self.reader.error(
                f"{key} has {len(wide)} convolutions wider than one frame instead of one."
            )
        convs.remove(wide[0])
        for name, node in zip(("linear_local", "linear1", "linear2"), (*wide, *convs), strict=True):
            self._file_conv(f"{key}.{name}", node)
        return int(attribute(wide[0], "dilations", [1])[0])

    def _transit(self, key: str) -> Tensor | None:
        self._norm(f"{key}.nonlinear.batchnorm", self._take("BatchNormalization"))
        node = self._take("Conv")
        self.state[f"{key}.linear.weight"] = self.reader.weight(node, 1)
        return self._bias(node)

    def _tail(self, bias: Tensor | None) -> int:
        """Output norm (perhaps folded, then it left `bias` in the last transit), dense layer, its norm."""
        key = "xvector.out_nonlinear.batchnorm"
        if bias is not None:
            self._file_norm(key, torch.ones_like(bias), bias)
        else:
            self._norm(key, self._take("BatchNormalization"))
        node = self._take("Conv")
        weight = self.reader.weight(node, 1)
        shift = self._bias(node)
        scale = torch.ones(len(weight))
        if shift is None:
            scale, shift = self._affine(self._take("BatchNormalization"))
        # The official last norm has no scale and shift of its own: they go into the weight and the mean.
        self.state["xvector.dense.linear.weight"] = weight * scale[:, None, None]
        self.state["xvector.dense.nonlinear.batchnorm.running_mean"] = -shift
        self.state["xvector.dense.nonlinear.batchnorm.running_var"] = torch.full_like(shift, 1 - _EPSILON)
        return len(weight)

    def _segment(self) -> int:
        pools = [node for node in self.reader.nodes if node.op_type == "AveragePool"]
        sizes = {int(attribute(node, "kernel_shape")[0]) for node in pools}
        if len(sizes) != 1:
            raise self.reader.error(f"segment means have {sorted(sizes)} frames, one size is expected.")
        return sizes.pop()

    # ---- one operator at a time ----------------------------------------------------------------------
    def _peek(self) -> onnx.NodeProto:
        if self._next >= len(self._nodes):
            raise self.reader.error("its convolutions and batch norms end too early.")
        return self._nodes[self._next]

    def _take(self, kind: str) -> onnx.NodeProto:
        node = self._peek()
        if node.op_type != kind:
            raise self.reader.error(
                f"a {kind} is expected where {node.op_type} {node.name!r} stands "
                f"({self._next + 1}. of its convolutions and batch norms)."
            )
        self._next += 1
        return node

    def _file_conv(self, key: str, node: onnx.NodeProto) -> None:
        self.state[f"{key}.weight"] = self.reader.weight(node, 1)
        bias = self._bias(node)
        if bias is not None:
            self.state[f"{key}.bias"] = bias

    def _conv_norm(self, key: str, norm_key: str, stride: int = 1) -> Tensor:
        node = self._take("Conv")
        if self._strides(node)[0] != stride:
            raise self.reader.error(f"{key} has the stride {self._strides(node)[0]}, {stride} is expected.")
        weight = self.state[f"{key}.weight"] = self.reader.weight(node, 1)
        bias = self._bias(node)
        if bias is None:
            self._norm(norm_key, self._take("BatchNormalization"))
        else:
            self._file_norm(norm_key, torch.ones_like(bias), bias)
        return weight

    def _norm(self, key: str, node: onnx.NodeProto) -> None:
        self._file_norm(key, *self._affine(node))

    def _file_norm(self, key: str, scale: Tensor, shift: Tensor) -> None:
        self.state |= {
            f"{key}.weight": scale,
            f"{key}.bias": shift,
            f"{key}.running_mean": torch.zeros_like(shift),
            f"{key}.running_var": torch.full_like(shift, 1 - _EPSILON),
        }

    def _affine(self, node: onnx.NodeProto) -> tuple[Tensor, Tensor]:
        """Scale and shift that a batch norm amounts to."""
        weight, bias, mean, variance = (self.reader.weight(node, index).double() for index in range(1, 5))
        scale = weight / (variance + attribute(node, "epsilon", _EPSILON)).sqrt()
        return scale.float(), (bias - mean * scale).float()

    def _bias(self, node: onnx.NodeProto) -> Tensor | None:
        return self.reader.weight(node, 2) if len(node.input) > 2 else None

    def _strides(self, node: onnx.NodeProto) -> tuple[int, ...]:
        return tuple(attribute(node, "strides", [1, 1]))
