"""The special tokens of each family, in the order of their ids, which continue those of the text tokenizer.

Version 2: <|im_start|> and so on are Qwen2's own, the others stand for sounds and emphasis. Version 3 adds
the phonemes of ARPAbet (vowels also with their stress) and the initials and finals of pinyin with tone marks.
Version 1: the tokens of Whisper with 100 languages (whisper.tokenizer).
"""

from __future__ import annotations

_SOUNDS = (
    *("[breath]", "<strong>", "</strong>", "[noise]", "[laughter]", "[cough]", "[clucking]", "[accent]"),
    *("[quick_breath]", "<laughter>", "</laughter>", "[hissing]", "[sigh]", "[vocalized-noise]"),
    *("[lipsmack]", "[mn]"),
)

_ARPABET = (
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
)
_PINYIN = """
    a ai an ang ao b c ch d e ei en eng f g h i ian in ing iu
    ià iàn iàng iào iá ián iáng iáo iè ié iòng ióng iù iú
    iā iān iāng iāo iē iě iōng iū iǎ iǎn iǎng iǎo iǒng iǔ
    j k l m n o ong ou p q r s sh t u uang ue un uo
    uà uài uàn uàng uá uái uán uáng uè ué uì uí uò uó uā uāi uān uāng uē uě uī uō uǎ uǎi uǎn uǎng uǐ uǒ vè
    w x y z zh
    à ài àn àng ào á ái án áng áo è èi èn èng èr é éi én éng ér ì ìn ìng í ín íng
    ò òng òu ó óng óu ù ùn ú ún ā āi ān āng āo ē ēi ēn ēng ě ěi ěn ěng ěr ī īn īng
    ō ōng ōu ū ūn ǎ ǎi ǎn ǎng ǎo ǐ ǐn ǐng ǒ ǒng ǒu ǔ ǔn ǘ ǚ ǜ
"""
_LANGUAGES = """
    en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt
    la mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc
    ka be tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue
"""


def _phonemes() -> list[str]:
    vowels = set("AEIOU")
    return [
        f"[{phoneme}{stress}]"
        for phoneme in _ARPABET.split()
        for stress in (("", "0", "1", "2") if phoneme[0] in vowels else ("",))
    ]


COSYVOICE2 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|endofprompt|>", *_SOUNDS)
COSYVOICE3 = (*COSYVOICE2, "<|endofsystem|>", *_phonemes(), *(f"[{part}]" for part in _PINYIN.split()))
WHISPER = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in _LANGUAGES.split()),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"),
    "<|notimestamps|>",
    *(f"<|{i / 50:.2f}|>" for i in range(1501)),  # up to 30 s
)

SPECIAL_TOKENS = {"cosyvoice1": WHISPER, "cosyvoice2": COSYVOICE2, "cosyvoice3": COSYVOICE3}
