"""CosyVoice 2's language model against the official one, as PyTorch module and as served ONNX graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from cosytriton_ensemble.pipeline import COSYVOICE2
from cosytriton_export import graph
from cosytriton_export.checkpoint import TEXT_MODEL, Checkpoint
from cosytriton_export.errors import CheckpointError
from cosytriton_export.hyperyaml import load_hyperyaml
from cosytriton_export.llm import LanguageModel
from cosytriton_export.llm_graph import METADATA_KEY, export_llm
from cosytriton_export.qwen2 import Qwen2Config

Array = npt.NDArray[np.float32]

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-4  # of logits: what float32 and float64 runs of the official model differ by
CAPACITY = 64  # positions of a cache
LLM_CONFIG = {"speech_token_size": 251, "sampling": {"top_p": 0.8, "top_k": 25, "win_size": 10, "tau_r": 0.1}}


def qwen_config() -> dict[str, float]:
    with safe_open(GOLDEN / "llm_v2_weights.safetensors", "pt") as file:
        sizes = file.metadata()
    return {
        "hidden_size": int(sizes["hidden"]),
        "intermediate_size": int(sizes["inter"]),
        "num_hidden_layers": int(sizes["layers"]),
        "num_attention_heads": int(sizes["heads"]),
        "num_key_value_heads": int(sizes["kv_heads"]),
        "rope_theta": float(sizes["rope_theta"]),
        "rms_norm_eps": float(sizes["rms_eps"]),
    }


def load(state: dict[str, Tensor]) -> LanguageModel:
    return LanguageModel.from_state(qwen_config(), LLM_CONFIG, state, "llm.pt")


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return load_file(GOLDEN / "llm_v2_weights.safetensors")


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "llm_v2.safetensors")


@pytest.fixture(scope="module")
def model(state: dict[str, Tensor]) -> LanguageModel:
    return load(state)


@pytest.fixture(scope="module")
def model_path(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "model.onnx"
    export_llm(model, path)
    return path


@pytest.fixture(scope="module")
def session(model_path: Path) -> ort.InferenceSession:
    return open_session(model_path)


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
        self.caches = {
            tensor.name: ort.OrtValue.ortvalue_from_numpy(
                np.zeros((batch, tensor.shape[1], capacity, tensor.shape[3]), np.float32)
            )
            for tensor in session.get_inputs()
            if "cache" in tensor.name
        }

    def __call__(self, ids: npt.ArrayLike, past: Sequence[int], new: Sequence[int] | None = None) -> Array:
        """Logits [batch, speech_rows] of new ids [batch, new] behind `past` positions."""
        ids = np.asarray(ids, np.int32)
        binding = self.session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
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

    @torch.no_grad()
    def __call__(self, ids: npt.ArrayLike, past: Sequence[int]) -> Array:
        embeddings = self.model.embedding_table()[torch.as_tensor(np.asarray(ids)).long()]
        counts = torch.tensor(past, dtype=torch.int32)
        _, logits, self.keys, self.values = self.model(embeddings, counts, self.keys, self.values)
        last: Array = logits[:, -1].numpy()
        return last


def golden_prompt(model: LanguageModel, golden: dict[str, Tensor], prompted: bool = True) -> Tensor:
    if not prompted:
        return model.ids.prompt(golden["text"], golden["prompt_speech_token"][:, :0])
    text = torch.cat([golden["prompt_text"], golden["text"]], 1)
    return model.ids.prompt(text, golden["prompt_speech_token"])


def greedy(
    run: TorchRun | OnnxRun, model: LanguageModel, prompt: Tensor, steps: int
) -> tuple[list[int], Array]:
    """The most likely speech codes, each fed back, and the logits [steps, speech_rows] that gave them."""
    ids, past, codes, logits = prompt.numpy(), 0, list[int](), list[Array]()
    for _ in range(steps):
        logits.append(run(ids, [past])[0])
        codes.append(int(logits[-1][: model.ids.speech_codes].argmax()))
        past += ids.shape[1]
        ids = np.array([[model.ids.speech_offset + codes[-1]]])
    return codes, np.stack(logits)


@pytest.mark.parametrize(("prompted", "name"), [(True, "lm_input"), (False, "noprompt_lm_input")])
def test_ids_of_a_prompt_embed_as_the_official_prompt(
    model: LanguageModel, golden: dict[str, Tensor], prompted: bool, name: str
) -> None:
    ids = golden_prompt(model, golden, prompted)
    torch.testing.assert_close(model.embedding_table()[ids.long()], golden[name], rtol=0, atol=0)


@torch.no_grad()
def test_prefill_matches_official_states_and_logits(model: LanguageModel, golden: dict[str, Tensor]) -> None:
    caches = model.empty_caches(1, CAPACITY), model.empty_caches(1, CAPACITY)
    hidden, logits, _, _ = model(golden["lm_input"], torch.zeros(1, dtype=torch.int32), *caches)
    torch.testing.assert_close(hidden, golden["prefill_hidden"], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits, golden["prefill_logits"], rtol=0, atol=TOLERANCE)


def runs(model: LanguageModel, session: ort.InferenceSession) -> dict[str, TorchRun | OnnxRun]:
    return {
        "torch": TorchRun(model),
        "onnx": OnnxRun(session, in_place=False),
        "onnx in place": OnnxRun(session),
    }


@pytest.mark.parametrize("kind", ["torch", "onnx", "onnx in place"])
def test_greedy_decoding_matches_official_ids_and_logits(
    model: LanguageModel, session: ort.InferenceSession, golden: dict[str, Tensor], kind: str
) -> None:
    wanted, steps = golden["greedy_logits"][0].numpy(), len(golden["greedy_ids"])
    codes, logits = greedy(runs(model, session)[kind], model, golden_prompt(model, golden), steps)
    assert codes == golden["greedy_ids"].tolist()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["torch", "onnx", "onnx in place"])
def test_greedy_decoding_without_a_prompt_matches_official_ids(
    model: LanguageModel, session: ort.InferenceSession, golden: dict[str, Tensor], kind: str
) -> None:
    wanted = golden["noprompt_greedy_ids"].tolist()
    codes, _ = greedy(runs(model, session)[kind], model, golden_prompt(model, golden, False), len(wanted))
    assert codes == wanted


def test_in_place_equals_fresh_caches_bit_by_bit(
    model: LanguageModel, session: ort.InferenceSession, golden: dict[str, Tensor]
) -> None:
    prompt = golden_prompt(model, golden)
    fresh, in_place = OnnxRun(session, in_place=False), OnnxRun(session)
    np.testing.assert_array_equal(greedy(in_place, model, prompt, 24)[1], greedy(fresh, model, prompt, 24)[1])
    for name, cache in fresh.caches.items():
        np.testing.assert_array_equal(in_place.caches[name].numpy(), cache.numpy())


def test_capacity_and_old_cache_content_do_not_change_a_bit(
    model: LanguageModel, session: ort.InferenceSession, golden: dict[str, Tensor]
) -> None:
    prompt = golden_prompt(model, golden)
    used = OnnxRun(session, capacity=2 * CAPACITY)
    for cache in used.caches.values():
        cache.update_inplace(np.full(cache.shape(), 1e3, np.float32))
    np.testing.assert_array_equal(
        greedy(used, model, prompt, 24)[1], greedy(OnnxRun(session), model, prompt, 24)[1]
    )


# Rows at unequal places: (chunks that a row's ids arrive in), one column is one run of the batch.
SCHEDULE = [(28, 1, 1), (3, 9, 1), (1, 1, 4), (0, 17, 0)]


def test_a_row_of_a_ragged_batch_equals_the_row_alone_bit_by_bit(
    model: LanguageModel, session: ort.InferenceSession
) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, model.ids.sos_id, sum(chunks)) for chunks in SCHEDULE]
    batch, alone = OnnxRun(session, len(rows)), [OnnxRun(session) for _ in rows]
    past = np.zeros(len(rows), int)
    for counts in zip(*SCHEDULE, strict=True):
        padded = rng.integers(0, model.ids.sos_id, (len(rows), max(counts)))
        for row, count in enumerate(counts):
            padded[row, :count] = rows[row][past[row] : past[row] + count]
        logits = batch(padded, past.tolist(), counts)
        for row, count in enumerate(counts):
            if count:
                wanted = alone[row](padded[row : row + 1, :count], [past[row]])[0]
                np.testing.assert_array_equal(logits[row], wanted)
        past += counts


def test_prefill_in_one_go_equals_token_by_token(
    model: LanguageModel, session: ort.InferenceSession, golden: dict[str, Tensor]
) -> None:
    ids, stepwise = golden_prompt(model, golden).numpy(), OnnxRun(session)
    steps = [stepwise(ids[:, [i]], [i]) for i in range(ids.shape[1])]
    np.testing.assert_allclose(steps[-1], OnnxRun(session)(ids, [0]), rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.concatenate(steps), golden["prefill_logits"][0], rtol=0, atol=TOLERANCE)


def test_graph_says_its_ids_and_sizes(session: ort.InferenceSession) -> None:
    metadata = json.loads(session.get_modelmeta().custom_metadata_map[METADATA_KEY])
    assert metadata == {
        "speech_offset": 300,
        "speech_codes": 251,
        "speech_rows": 254,
        "sos_id": 554,
        "task_id": 555,
        "eos_id": 251,
        "stop_ids": [251, 252, 253],
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "sampling": LLM_CONFIG["sampling"],
    }


def test_graph_has_the_declared_tensors(session: ort.InferenceSession) -> None:
    cache = ["batch", 2, "capacity", 16]
    caches = [(kind, layer) for kind in ("key", "value") for layer in range(2)]
    assert {tensor.name: tensor.shape for tensor in session.get_inputs()} == {
        "input_ids": ["batch", "new"],
        "past_counts": ["batch"],
        "new_counts": ["batch"],
    } | {f"{kind}_cache.{layer}": cache for kind, layer in caches}
    assert {tensor.name: tensor.shape for tensor in session.get_outputs()} == {
        "logits": ["batch", 254],
    } | {f"{kind}_cache_out.{layer}": cache for kind, layer in caches}


def test_weights_of_the_graph_keep_their_official_names(model_path: Path, state: dict[str, Tensor]) -> None:
    """MatMul wants a weight transposed; an exclusion list of a quantiser goes by its name."""
    nodes = onnx.load(model_path).graph
    matrices = {node.input[1] for node in nodes.node if node.op_type == "MatMul"}
    weights = {name for name in matrices if name in {tensor.name for tensor in nodes.initializer}}
    layers = [key for key in state if key.endswith("_proj.weight")]
    assert weights == {*layers, "llm_decoder.weight"}


def test_large_weights_go_beside_the_graph(
    model: LanguageModel,
    model_path: Path,
    session: ort.InferenceSession,
    golden: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph, "EXTERNAL_DATA_BYTES", 1000)
    graph.save_model(ir.load(model_path), tmp_path / "model.onnx")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    ids = golden_prompt(model, golden).numpy()
    moved = open_session(tmp_path / "model.onnx")
    np.testing.assert_array_equal(OnnxRun(moved)(ids, [0]), OnnxRun(session)(ids, [0]))


def test_positions_beyond_the_capacity_are_refused(session: ort.InferenceSession) -> None:
    with pytest.raises(RuntimeError, match="exceeds max_sequence_length"):
        OnnxRun(session, batch=2)(np.zeros((2, 8)), [0, CAPACITY - 7])


def test_a_codebook_without_a_stop_token_is_refused(state: dict[str, Tensor]) -> None:
    config = LLM_CONFIG | {"speech_token_size": 254}
    with pytest.raises(CheckpointError, match="speech_token_size is 254"):
        LanguageModel.from_state(qwen_config(), config, state, "llm.pt")


def test_model_of_a_checkpoint_directory(
    model: LanguageModel, state: dict[str, Tensor], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "llm.pt")
    (tmp_path / TEXT_MODEL).mkdir()
    (tmp_path / TEXT_MODEL / "config.json").write_text(json.dumps(qwen_config() | {"model_type": "qwen2"}))
    checkpoint = Checkpoint(tmp_path, COSYVOICE2, load_hyperyaml(GOLDEN / "cosyvoice2_tiny.yaml"))
    loaded = LanguageModel.from_checkpoint(checkpoint)
    assert (loaded.sizes, loaded.ids, loaded.sampling) == (model.sizes, model.ids, model.sampling)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_every_key_is_consumed(state: dict[str, Tensor]) -> None:
    norm = "llm.model.model.norm.weight"
    with pytest.raises(CheckpointError, match=f"missing keys: {norm}"):
        load({key: value for key, value in state.items() if key != norm})
    with pytest.raises(CheckpointError, match=r"missing keys: .*embed_tokens\.weight"):
        load({key: value for key, value in state.items() if "embed_tokens" not in key})
    with pytest.raises(CheckpointError, match=r"unknown keys: spk_embed_affine_layer\.weight"):
        load(state | {"spk_embed_affine_layer.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=rf"wrong shapes: {norm} \[63\] instead of \[64\]"):
        load(state | {norm: torch.zeros(63)})


def test_qwen_config_without_a_size_is_refused() -> None:
    config = qwen_config()
    del config["rope_theta"]
    with pytest.raises(CheckpointError, match="rope_theta"):
        Qwen2Config.from_json(config)


def test_qwen_config_with_heads_that_do_not_divide_the_width_is_refused() -> None:
    with pytest.raises(CheckpointError, match="multiple"):
        Qwen2Config.from_json(qwen_config() | {"num_attention_heads": 5})
