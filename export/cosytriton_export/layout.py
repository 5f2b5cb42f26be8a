"""What stands in a CosyVoice checkpoint directory, the official layout.

cosyvoice.yaml                 v1; cosyvoice2.yaml: v2; cosyvoice3.yaml: v3; sizes of all modules
llm.pt  flow.pt  hift.pt       state dicts
campplus.onnx                  speaker encoder
speech_tokenizer_v1.onnx       speech tokenizer; v2 and v3 with their number
CosyVoice-BlankEN/             v2, v3: Qwen2 sizes (config.json) and the text tokenizer
spk2info.pt                    may be there: speakers by name
UNTRAINED                      only in a checkpoint with random weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3

OnnxName = Literal["campplus", "speech_tokenizer"]

TEXT_MODEL = "CosyVoice-BlankEN"
UNTRAINED = "UNTRAINED"
SPEAKERS = "spk2info.pt"
CAMPPLUS = "campplus.onnx"
TEXT_MODEL_FILES = tuple(
    f"{TEXT_MODEL}/{name}" for name in ("config.json", "vocab.json", "merges.txt", "tokenizer_config.json")
)


@dataclass(frozen=True)
class Layout:
    """What stands in the checkpoints of one family: file names, and the classes that its yaml file names."""

    speech_tokenizer: str
    classes: Mapping[str, str]  # of the modules llm, flow and hift
    has_text_model: bool = True

    @property
    def onnx_files(self) -> Mapping[OnnxName, str]:
        """The speaker encoder and the speech tokenizer."""
        return {"campplus": CAMPPLUS, "speech_tokenizer": self.speech_tokenizer}

    @property
    def files(self) -> tuple[str, ...]:
        """The files that must be there, without the yaml file."""
        text_model = TEXT_MODEL_FILES if self.has_text_model else ()
        return ("llm.pt", "flow.pt", "hift.pt", CAMPPLUS, self.speech_tokenizer, *text_model)


LAYOUTS: Mapping[str, Layout] = {
    COSYVOICE1.name: Layout(
        "speech_tokenizer_v1.onnx",
        {
            "llm": "cosyvoice.llm.llm.TransformerLM",
            "flow": "cosyvoice.flow.flow.MaskedDiffWithXvec",
            "hift": "cosyvoice.hifigan.generator.HiFTGenerator",
        },
        has_text_model=False,  # its text tokenizer is Whisper's
    ),
    COSYVOICE2.name: Layout(
        "speech_tokenizer_v2.onnx",
        {
            "llm": "cosyvoice.llm.llm.Qwen2LM",
            "flow": "cosyvoice.flow.flow.CausalMaskedDiffWithXvec",
            "hift": "cosyvoice.hifigan.generator.HiFTGenerator",
        },
    ),
    COSYVOICE3.name: Layout(
        "speech_tokenizer_v3.onnx",
        {
            "llm": "cosyvoice.llm.llm.CosyVoice3LM",
            "flow": "cosyvoice.flow.flow.CausalMaskedDiffWithDiT",
            "hift": "cosyvoice.hifigan.generator.CausalHiFTGenerator",
        },
    ),
}
