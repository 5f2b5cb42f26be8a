"""The three CosyVoice families: the rates and sizes that all checkpoints of a family share.

Shapes of one checkpoint (vocabulary, widths) are read from it and never stand here.
"""

from __future__ import annotations

from dataclasses import dataclass

from cosytriton_ensemble.errors import InputError

END_OF_PROMPT = "<|endofprompt|>"


@dataclass(frozen=True, slots=True)
class Family:
    """Rates, sizes and abilities of a family."""

    name: str
    title: str  # how people call it
    config_file: str  # its name in a checkpoint tells the family
    sample_rate: int  # Hz of the spoken audio
    mel_hop: int  # samples per mel frame
    token_rate: int  # speech tokens per second
    speech_codes: int  # size of the speech codebook
    hop_tokens: int  # speech tokens of the first streamed chunk; v2, v3: the grid of the block mask
    max_hop_tokens: int  # speech tokens that a streamed chunk grows to
    lookahead: int  # speech tokens that a non-final chunk needs beyond its end
    overlap_frames: int  # mel frames that two vocoder chunks share and cross-fade; 0: samples are final
    context_frames: int = 0  # earlier mel frames that the samples of a vocoder chunk depend on (v3)
    fade_frames: int = 0  # mel frames that two chunks of the flow share and cross-fade (v1)
    source_hold: int = (
        0  # samples at the end of a call in which the phase of the vocoder's source stands still
    )
    bistream: bool = True  # the language model can begin before the text ends
    prompt_mark: str = ""  # ends an instruction; required of instructions where it is not empty
    closing_mark: str = ""  # is put behind an instruction that has none (v1)
    system_prompt: str = ""  # stands before a transcript that brings no `prompt_mark` of its own (v3)
    silent_tokens: frozenset[int] = frozenset()  # of these, a few in a row reach the flow (v3)

    def frames(self, tokens: int) -> int:
        """Mel frames of `tokens` speech tokens."""
        return tokens * self.sample_rate // (self.token_rate * self.mel_hop)

    def samples(self, tokens: int) -> int:
        """Audio samples of `tokens` speech tokens that are spoken in one piece."""
        return self.frames(tokens) * self.mel_hop

    def first_chunk(self, prompt_tokens: int) -> int:
        """Speech tokens of a stream's first chunk; it ends on the grid of the block mask, prompt included."""
        return self.hop_tokens + (-prompt_tokens % self.hop_tokens if self.block_mask else 0)

    @property
    def block_mask(self) -> bool:
        """Whether the flow can hide later blocks of tokens, so that they never change earlier mel."""
        return not self.fade_frames

    @property
    def overlap_samples(self) -> int:
        """Audio samples that two vocoder chunks share."""
        return self.overlap_frames * self.mel_hop


COSYVOICE1 = Family(
    name="cosyvoice1",
    title="CosyVoice-300M",
    config_file="cosyvoice.yaml",
    sample_rate=22_050,
    mel_hop=256,
    token_rate=50,
    speech_codes=4096,
    hop_tokens=100,
    max_hop_tokens=100,
    lookahead=20,
    overlap_frames=20,
    fade_frames=34,
    closing_mark="<endofprompt>",
    bistream=False,
)
COSYVOICE2 = Family(
    name="cosyvoice2",
    title="CosyVoice2-0.5B",
    config_file="cosyvoice2.yaml",
    sample_rate=24_000,
    mel_hop=480,
    token_rate=25,
    speech_codes=6561,  # 3^8, finite scalar quantisation
    hop_tokens=25,
    max_hop_tokens=100,
    lookahead=3,
    overlap_frames=8,
    source_hold=240,
    prompt_mark=END_OF_PROMPT,
)
COSYVOICE3 = Family(
    name="cosyvoice3",
    title="Fun-CosyVoice3-0.5B",
    config_file="cosyvoice3.yaml",
    sample_rate=24_000,
    mel_hop=480,
    token_rate=25,
    speech_codes=6561,
    hop_tokens=25,
    max_hop_tokens=100,
    lookahead=3,
    overlap_frames=0,
    context_frames=37,
    prompt_mark=END_OF_PROMPT,
    system_prompt=f"You are a helpful assistant.{END_OF_PROMPT}",
    silent_tokens=frozenset({1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323}),
)

FAMILIES = {family.name: family for family in (COSYVOICE1, COSYVOICE2, COSYVOICE3)}


def family_named(name: str) -> Family:
    """Look a family up by `Family.name`; InputError when there is none."""
    if name not in FAMILIES:
        raise InputError(f"There is no model family {name!r}; known are {', '.join(FAMILIES)}.")
    return FAMILIES[name]
