"""The language models of all families against the official ones, as PyTorch modules and as ONNX graphs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from cosytriton_ensemble.llm_spec import METADATA_KEY
from cosytriton_export import graph
from cosytriton_export.checkpoint import Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.llm import language_model_of
from cosytriton_export.llm_base import LanguageModel
from cosytriton_export.llm_graph import TEXT_ENCODER
from cosytriton_export.llm_transformer import PromptEncoder, TransformerLM

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
State = dict[str, Tensor]

TOLERANCE = 1e-4  # of logits: what float32 and float64 runs of the official model differ by
CAPACITY = 64  # positions of a cache
VERSIONS = ["v1", "v2", "v3"]
RUNS = ["torch", "onnx", "onnx in place"]


@dataclass(frozen=True)
class Case:
    """A family's golden model and the run of the official one."""

    version: str
    checkpoint: Checkpoint
    model: LanguageModel
    state: State
    golden: Any
    path: Path  # of the graph

    @property
    def session(self) -> ort.InferenceSession:
        return open_session(self.path)

    def prompt(self, mode: str = "") -> Prompt:
        """What the official code has as input in this mode; the default is zero-shot."""
        g, ids = self.golden, self.model.ids
        parts = ("text",) if mode in ("noprompt_", "sft_") else ("prompt_text", "text")
        text = np.concatenate([g[part] for part in parts], 1)
        speech = g["prompt_speech_token"][:, : 0 if mode else None]
        if not isinstance(self.model, TransformerLM):
            return Prompt(ids.prompt(torch.from_numpy(text), torch.from_numpy(speech)).numpy())
        encode = PromptEncoder(self.model)
        encoded, speaker = encode(torch.from_numpy(text), torch.from_numpy(g["embedding"]))
        heard = encoded if mode == "instruct_" else torch.cat([speaker, encoded], 1)
        row = np.concatenate([[ids.sos_id], [-1] * heard.shape[1], [ids.task_id], speech[0]])
        embeddings = np.zeros((1, len(row), self.model.width), np.float32)
        embeddings[:, 1 : 1 + heard.shape[1]] = heard
        return Prompt(row[None].astype(np.int32), embeddings)


@dataclass(frozen=True)
class Prompt:
    ids: Ids  # [1, n]
    embeddings: Array | None = None  # [1, n, width], where an id is negative

    def row(self, row: int, end: int | None = None) -> Prompt:
        """The first positions of a row alone."""
        assert self.embeddings is not None
        return Prompt(self.ids[row : row + 1, :end], self.embeddings[row : row + 1, :end])


@pytest.fixture(scope="module")
def cases(golden: Callable[[str], Any], golden_lm: Callable[[str], Any]) -> Callable[[str], Case]:
    @lru_cache
    def case(version: str) -> Case:
        lm = golden_lm(version)
        return Case(version, lm.checkpoint, lm.model, lm.state, golden(f"llm_{version}"), lm.graph)

    return case


@pytest.fixture(params=VERSIONS)
def case(request: pytest.FixtureRequest, cases: Callable[[str], Case]) -> Case:
    return cases(request.param)


def open_session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # a cache that is not bound in place is copied, with a warning
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class OnnxRun:
    """The served graph with caches that it updates in place, or that are replaced after each run."""

    def __init__(
        self, session: ort.InferenceSession, batch: int = 1, capacity: int = CAPACITY, in_place: bool = True
    ) -> None:
        self.session, self.in_place = session, in_place
        self.inputs = {tensor.name: tensor for tensor in session.get_inputs()}
        self.caches = {
            name: ort.OrtValue.ortvalue_from_numpy(
                np.zeros((batch, tensor.shape[1], capacity, tensor.shape[3]), np.float32)
            )
            for name, tensor in self.inputs.items()
            if "cache" in name
        }

    def __call__(self, prompt: Prompt, past: Sequence[int], new: Sequence[int] | None = None) -> Array:
        """Logits [batch, speech_rows] of new ids [batch, new] behind `past` positions."""
        ids = np.ascontiguousarray(prompt.ids, np.int32)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        if "embeddings" in self.inputs:
            shape = (*ids.shape, self.inputs["embeddings"].shape[2])
            given = np.zeros(shape) if prompt.embeddings is None else prompt.embeddings
            binding.bind_cpu_input("embeddings", np.ascontiguousarray(given, np.float32))
        binding.bind_cpu_input("past_counts", np.asarray(past, np.int32))
        new = [ids.shape[1]] * len(ids) if new is None else new
        binding.bind_cpu_input("new_counts", np.asarray(new, np.int32))
        binding.bind_output("logits")
        for name, cache in self.caches.items():
            binding.bind_ortvalue_input(name, cache)
            if self.in_place:
                binding.bind_ortvalue_output(cache_out(name), cache)
            else:
                binding.bind_output(cache_out(name))
        self.session.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        if not self.in_place:
            self.caches = dict(zip(self.caches, outputs[1:], strict=True))
        logits: Array = outputs[0].numpy()
        return logits


def cache_out(name: str) -> str:
    return name.replace("_cache.", "_cache_out.")


class TorchRun:
    """The PyTorch module with the calling convention of the graph."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.keys, self.values = model.empty_caches(1, CAPACITY), model.empty_caches(1, CAPACITY)

    def __call__(self, prompt: Prompt, past: Sequence[int]) -> Array:
        counts = torch.tensor(past, dtype=torch.int32)
        x = torch.from_numpy(embed(self.model, prompt))
        _, logits, self.keys, self.values = self.model(x, counts, self.keys, self.values)
        last: Array = logits[:, -1].numpy()
        return last


def embed(model: LanguageModel, prompt: Prompt) -> Array:
    by_id: Array = model.embedding_table().numpy()[np.maximum(prompt.ids, 0)]
    if prompt.embeddings is None:
        return by_id
    return np.where(prompt.ids[..., None] < 0, prompt.embeddings, by_id)


def run_of(case: Case, kind: str) -> TorchRun | OnnxRun:
    return TorchRun(case.model) if kind == "torch" else OnnxRun(case.session, in_place=kind != "onnx")


def greedy(run: TorchRun | OnnxRun, case: Case, prompt: Prompt, steps: int) -> tuple[list[int], Array]:
    """The most likely speech codes, each fed back, and the logits [steps, speech_rows] that gave them."""
    past, codes, logits, ids = 0, list[int](), list[Array](), case.model.ids
    for _ in range(steps):
        logits.append(run(prompt, [past])[0])
        codes.append(int(logits[-1][: ids.speech_codes].argmax()))
        past += prompt.ids.shape[1]
        prompt = Prompt(np.array([[ids.speech_offset + codes[-1]]], np.int32))
    return codes, np.stack(logits)


MODES = [("v1", ""), ("v1", "sft_"), ("v1", "instruct_"), ("v2", ""), ("v2", "noprompt_"), ("v3", "")]


@pytest.mark.parametrize(("version", "mode"), MODES)
def test_a_prompt_embeds_as_the_official_prompt(
    cases: Callable[[str], Case], version: str, mode: str
) -> None:
    case = cases(version)
    atol = 1e-6 if version == "v1" else 0  # the text went through an encoder
    case.golden.assert_close(f"{mode}lm_input", embed(case.model, case.prompt(mode)), atol=atol)


def test_prefill_matches_official_states_and_logits(case: Case) -> None:
    caches = case.model.empty_caches(1, CAPACITY), case.model.empty_caches(1, CAPACITY)
    prompt = torch.from_numpy(case.golden["lm_input"])
    hidden, logits, _, _ = case.model(prompt, torch.zeros(1, dtype=torch.int32), *caches)
    case.golden.assert_close("prefill_hidden", hidden, atol=TOLERANCE)
    case.golden.assert_close("prefill_logits", logits, atol=TOLERANCE)


@pytest.mark.parametrize("kind", RUNS)
def test_greedy_decoding_matches_official_ids_and_logits(case: Case, kind: str) -> None:
    wanted = case.golden["greedy_ids"].tolist()
    codes, logits = greedy(run_of(case, kind), case, case.prompt(), len(wanted))
    assert codes == wanted
    case.golden.assert_close("greedy_logits", logits[None], atol=TOLERANCE)
    case.golden.assert_close("greedy_logp", torch.from_numpy(logits).log_softmax(1), atol=TOLERANCE)


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize(("version", "mode"), [m for m in MODES if m[1]])
def test_greedy_decoding_in_other_modes_matches_official_ids(
    cases: Callable[[str], Case], version: str, mode: str, kind: str
) -> None:
    case = cases(version)
    wanted = case.golden[f"{mode}greedy_ids"].tolist()
    assert greedy(run_of(case, kind), case, case.prompt(mode), len(wanted))[0] == wanted


def test_in_place_equals_fresh_caches_bit_by_bit(case: Case) -> None:
    fresh, in_place = (OnnxRun(case.session, in_place=in_place) for in_place in (False, True))
    one, other = (greedy(run, case, case.prompt(), 24)[1] for run in (in_place, fresh))
    np.testing.assert_array_equal(one, other)
    for name, cache in fresh.caches.items():
        np.testing.assert_array_equal(in_place.caches[name].numpy(), cache.numpy())


def test_capacity_and_old_cache_content_do_not_change_a_bit(case: Case) -> None:
    used = OnnxRun(case.session, capacity=2 * CAPACITY)
    for cache in used.caches.values():
        cache.update_inplace(np.full(cache.shape(), 1e3, np.float32))
    one, other = (greedy(run, case, case.prompt(), 24)[1] for run in (used, OnnxRun(case.session)))
    np.testing.assert_array_equal(one, other)


# Rows at unequal places: (chunks that a row's ids arrive in), one column is one run of the batch.
SCHEDULE = [(28, 1, 1), (3, 9, 1), (1, 1, 4), (0, 17, 0)]


def test_a_row_of_a_ragged_batch_equals_the_row_alone(case: Case) -> None:
    """With the same padding to the bit. Without it too, but for CosyVoice 1, whose products of one row take
    another way through ONNX Runtime."""
    rng, rows = np.random.default_rng(0), range(len(SCHEDULE))
    batch, past = OnnxRun(case.session, len(SCHEDULE)), np.zeros(len(SCHEDULE), int)
    padded, bare = ([OnnxRun(case.session) for _ in rows] for _ in range(2))
    lowest, atol = (-50, 1e-5) if case.version == "v1" else (0, 0)  # negative: not an id, an embedding
    for counts in zip(*SCHEDULE, strict=True):
        shape = (len(SCHEDULE), max(counts))
        ids = rng.integers(lowest, case.model.ids.sos_id, shape, np.int32)
        prompt = Prompt(ids, rng.standard_normal((*shape, 64), np.float32))
        logits = batch(prompt, past.tolist(), counts)
        for row in rows:
            alone = padded[row](prompt.row(row), [past[row]], [counts[row]])
            np.testing.assert_array_equal(logits[row], alone[0])
            if counts[row]:
                alone = bare[row](prompt.row(row, counts[row]), [past[row]])
                np.testing.assert_allclose(logits[row], alone[0], rtol=0, atol=atol)
        past += counts


def test_prefill_in_one_go_equals_token_by_token(case: Case) -> None:
    prompt, stepwise = case.prompt(), OnnxRun(case.session)
    steps = [stepwise(at(prompt, i), [i]) for i in range(prompt.ids.shape[1])]
    np.testing.assert_allclose(steps[-1], OnnxRun(case.session)(prompt, [0]), rtol=0, atol=TOLERANCE)
    case.golden.assert_close("prefill_logits", np.concatenate(steps)[None], atol=TOLERANCE)


def at(prompt: Prompt, i: int) -> Prompt:
    embeddings = None if prompt.embeddings is None else prompt.embeddings[:, [i]]
    return Prompt(prompt.ids[:, [i]], embeddings)


METADATA = {
    "v1": """{"text_encoder": true, "text_rows": 300, "speech_offset": 0, "speech_codes": 251,
        "speech_rows": 252, "sos_id": 251, "task_id": 252, "eos_id": 251, "fill_id": null, "stop_ids": [251],
        "layers": 3, "kv_heads": 4,""",
    "v2": """{"text_encoder": false, "text_rows": 300, "speech_offset": 300, "speech_codes": 251,
        "speech_rows": 254, "sos_id": 554, "task_id": 555, "eos_id": 251, "fill_id": 253,
        "stop_ids": [251, 252, 253], "layers": 2, "kv_heads": 2,""",
    "v3": f"""{{"text_encoder": false, "text_rows": 300, "speech_offset": 300, "speech_codes": 251,
        "speech_rows": 451, "sos_id": 551, "task_id": 553, "eos_id": 252, "fill_id": 254,
        "stop_ids": {[*range(251, 451)]}, "layers": 2, "kv_heads": 2,""",
}
ALL_SAY = """ "official_min_length_id": 251, "head_dim": 16, "mix_ratio": [5, 15],
    "sampling": {"top_p": 0.8, "top_k": 25, "win_size": 10, "tau_r": 0.1}}"""


def test_graph_says_its_ids_and_sizes(case: Case) -> None:
    metadata = json.loads(case.session.get_modelmeta().custom_metadata_map[METADATA_KEY])
    assert metadata == json.loads(METADATA[case.version] + ALL_SAY)


def test_graph_has_the_declared_tensors(case: Case) -> None:
    ids, shape = case.model.ids, case.model.cache
    cache = ["batch", shape.heads, "capacity", shape.head_dim]
    caches = [(kind, layer) for kind in ("key", "value") for layer in range(shape.layers)]
    embeddings = {"embeddings": ["batch", "new", 64]} if isinstance(case.model, TransformerLM) else {}
    assert {tensor.name: tensor.shape for tensor in case.session.get_inputs()} == {
        "input_ids": ["batch", "new"],
        "past_counts": ["batch"],
        "new_counts": ["batch"],
    } | embeddings | {f"{kind}_cache.{layer}": cache for kind, layer in caches}
    assert {tensor.name: tensor.shape for tensor in case.session.get_outputs()} == {
        "logits": ["batch", ids.speech_rows],
    } | {f"{kind}_cache_out.{layer}": cache for kind, layer in caches}


def test_weights_of_the_graph_keep_their_official_names(case: Case) -> None:
    """MatMul wants a weight transposed; an exclusion list of a quantiser goes by its name."""
    nodes = onnx.load(case.path).graph
    constants = {tensor.name for tensor in nodes.initializer if len(tensor.dims) == 2}
    weights = {node.input[1] for node in nodes.node if node.op_type == "MatMul"} & constants
    # The weight of the distances is used as it is, by heads.
    layers = [  # some are joined
        re.sub("(gate|up)_proj", "gate_up_proj", re.sub(r"\b[qkv](?=_proj)|(?<=linear_)[qkv]\b", "qkv", key))
        for key, value in case.state.items()
        if key.startswith("llm.") and value.dim() == 2 and key.endswith(".weight")
        if not any(other in key for other in ("linear_pos", "embed_tokens", "lm_head"))
    ]
    assert weights == {*layers, "llm_decoder.weight"}


def test_large_weights_go_beside_the_graph(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "EXTERNAL_DATA_BYTES", 1000)
    graph.save_model(ir.load(case.path), tmp_path / "model.onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    moved = OnnxRun(open_session(tmp_path / "model.onnx"))
    np.testing.assert_array_equal(moved(case.prompt(), [0]), OnnxRun(case.session)(case.prompt(), [0]))


def test_only_a_model_with_a_text_encoder_has_its_graph(case: Case) -> None:
    assert case.path.with_name(TEXT_ENCODER).exists() == isinstance(case.model, TransformerLM)


def test_positions_beyond_the_capacity_are_refused(case: Case) -> None:
    with pytest.raises(RuntimeError, match="exceeds max_sequence_length"):
        OnnxRun(case.session, batch=2)(Prompt(np.zeros((2, 8), np.int32)), [0, CAPACITY - 7])


def test_every_key_is_consumed(case: Case, tmp_path: Path) -> None:
    norm = "llm.after_norm.weight" if case.version == "v1" else "llm.model.model.norm.weight"

    def refusal(state: State) -> str:
        shutil.copytree(case.checkpoint.path, tmp_path, dirs_exist_ok=True)
        torch.save(state, tmp_path / "llm.pt")
        with pytest.raises(CheckpointError) as error:
            language_model_of(replace(case.checkpoint, path=tmp_path))
        return str(error.value)

    without = {key: value for key, value in case.state.items() if key != norm}
    assert f"missing keys: {norm}" in refusal(without)
    assert "unknown keys: a.weight" in refusal(case.state | {"a.weight": torch.zeros(1)})
    assert f"wrong shapes: {norm} [63] instead of [64]" in refusal(case.state | {norm: torch.zeros(63)})
