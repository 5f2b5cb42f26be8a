"""The text tokenizer of a checkpoint as one `tokenizer.json`.

Qwen2's tokenizer (NFC, a split pattern, byte-level BPE: Qwen2 technical report, arXiv 2407.10671) from the
files in the checkpoint, plus the special tokens that CosyVoice 2 adds at load time. Their order matters: ids
continue after those of the files. The special tokens are found in the text itself, so "[breath]" is one id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cosytriton_export.checkpoint import TEXT_MODEL, Checkpoint, read_json
from cosytriton_export.errors import CheckpointError
from cosytriton_export.weights import name_some

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endofprompt|>",
    "[breath]",
    "<strong>",
    "</strong>",
    "[noise]",
    "[laughter]",
    "[cough]",
    "[clucking]",
    "[accent]",
    "[quick_breath]",
    "<laughter>",
    "</laughter>",
    "[hissing]",
    "[sigh]",
    "[vocalized-noise]",
    "[lipsmack]",
    "[mn]",
)

# English contractions | letters with one leading sign | one digit | signs | line ends | blanks
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Build the tokenizer of the checkpoint.

    Raises `CheckpointError`: its files do not fit each other or the rows of the text embedding.
    """
    tokenizer = tokenizer_from_files(checkpoint.path / TEXT_MODEL)
    rows = checkpoint.qwen_config["vocab_size"]
    used = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if not isinstance(rows, int) or used > rows:
        raise CheckpointError(
            f"{checkpoint.path / TEXT_MODEL}: the tokenizer has {used} ids, "
            f"but config.json allows {rows} rows."
        )
    return tokenizer


def tokenizer_from_files(directory: Path) -> Tokenizer:
    """Build the tokenizer from vocab.json, merges.txt and tokenizer_config.json in `directory`.

    Raises `CheckpointError`: a file is damaged, a byte has no token, or ids are not consecutive.
    """
    vocabulary = _vocabulary(directory / "vocab.json")
    merges = _merges(directory / "merges.txt", vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = _added_tokens(directory / "tokenizer_config.json", len(vocabulary))
    tokens = [*added, *(token for token in SPECIAL_TOKENS if token not in added)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return tokenizer


def byte_symbols() -> dict[int, str]:
    """Byte -> the printable character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {b: chr(b) for b in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _vocabulary(path: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token, number in read_json(path).items():
        if not isinstance(number, int):
            raise CheckpointError(f"{path}: the id of {token!r} is {number!r}, not a number.")
        vocabulary[token] = number
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise CheckpointError(f"{path}: the {len(vocabulary)} ids are not 0, 1, 2 and so on.")
    lacking = [f"0x{byte:02x}" for byte, symbol in byte_symbols().items() if symbol not in vocabulary]
    if lacking:
        raise CheckpointError(f"{path}: there is no token for the bytes {name_some(lacking)}.")
    return vocabulary


def _merges(path: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text ({error}).") from error
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2 or any(part not in vocabulary for part in (*pair, "".join(pair))):
            raise CheckpointError(
                f"{path}, line {number}: {line!r} is no pair whose parts and sum are in vocab.json."
            )
        merges.append((pair[0], pair[1]))
    return merges


def _added_tokens(path: Path, first: int) -> list[str]:
    """List the tokens that the configuration adds behind the vocabulary, in the order of their ids."""
    decoder = read_json(path).get("added_tokens_decoder", {})
    try:
        added = {int(number): str(entry["content"]) for number, entry in decoder.items()}  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: added_tokens_decoder is damaged ({error!r}).") from error
    if sorted(added) != list(range(first, first + len(added))):
        raise CheckpointError(
            f"{path}: the added ids {_short(added)} do not continue the vocabulary of {first} ids."
        )
    return [added[number] for number in sorted(added)]


def _short(numbers: Iterable[int]) -> str:
    return name_some(str(number) for number in sorted(numbers))


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write the tokenizer as one file that `tokenizers.Tokenizer.from_file` reads."""
    path.write_text(tokenizer.to_str(pretty=False), encoding="utf-8")


def write_tokenizer_files(directory: Path, merges: Iterable[tuple[str, str]] = ()) -> int:
    """Write vocab.json, merges.txt and tokenizer_config.json of a small byte-level BPE into `directory`.

    Each pair of `merges` (byte symbols or earlier merges) becomes one token. Returns the number of ids,
    special tokens included.
    """
    pairs = list(merges)
    tokens = [*byte_symbols().values(), *("".join(pair) for pair in pairs)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    first = len(vocabulary)
    decoder = {
        str(first + i): {"content": token, "special": True} for i, token in enumerate(SPECIAL_TOKENS[:3])
    }
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder}
    _write(directory / "vocab.json", json.dumps(vocabulary, ensure_ascii=False))
    _write(
        directory / "merges.txt",
        "".join(f"{left} {right}\n" for left, right in (("#version:", "0.2"), *pairs)),
    )
    _write(directory / "tokenizer_config.json", json.dumps(settings, indent=2))
    return first + len(SPECIAL_TOKENS)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
