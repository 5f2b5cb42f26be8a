"""The text tokenizer of a checkpoint as one `tokenizer.json`.

Qwen2's tokenizer (NFC, a split pattern, byte-level BPE: Qwen2 technical report, arXiv 2407.10671) from the
files in the checkpoint, plus the special tokens that CosyVoice 2 and 3 add at load time. Their order matters:
ids continue after those of the files. They are found in the text itself, so "[breath]" is one id.
CosyVoice 1: `whisper_tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers

from cosytriton_ensemble.families import COSYVOICE1
from cosytriton_export.byte_level import byte_symbols, split_tokenizer
from cosytriton_export.checkpoint import TEXT_MODEL, Checkpoint, read_json
from cosytriton_export.errors import CheckpointError
from cosytriton_export.special_tokens import SPECIAL_TOKENS
from cosytriton_export.weights import name_some
from cosytriton_export.whisper_tokenizer import whisper_tokenizer

# English contractions | letters with one leading sign | one digit | signs | line ends | blanks
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Build the tokenizer of the checkpoint; version 1 has Whisper's, which belongs to no checkpoint.

    Raises `CheckpointError`: its files do not fit each other or the rows of the text embedding.
    """
    if checkpoint.family == COSYVOICE1:
        return _whisper_tokenizer(checkpoint)
    tokenizer = tokenizer_from_files(checkpoint.path / TEXT_MODEL, checkpoint.family.name)
    rows = checkpoint.qwen_config["vocab_size"]
    used = _ids(tokenizer)
    if not isinstance(rows, int) or used > rows:
        raise CheckpointError(
            f"{checkpoint.path / TEXT_MODEL}: the tokenizer has {used} ids, "
            f"but config.json allows {rows} rows."
        )
    return tokenizer


def _whisper_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    tokenizer = whisper_tokenizer()
    rows = checkpoint.config["llm"]["text_token_size"]
    if rows != _ids(tokenizer):
        raise CheckpointError(
            f"{checkpoint.path}: text_token_size is {rows!r}, but Whisper's multilingual tokenizer has "
            f"{_ids(tokenizer)} ids. Models with another text tokenizer are not supported."
        )
    return tokenizer


def _ids(tokenizer: Tokenizer) -> int:
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def tokenizer_from_files(directory: Path, family_name: str = "cosyvoice2") -> Tokenizer:
    """Build the tokenizer from vocab.json, merges.txt and tokenizer_config.json in `directory`.

    Raises `CheckpointError`: a file is damaged, a byte has no token, or ids are not consecutive.
    """
    vocabulary = _vocabulary(directory / "vocab.json")
    merges = _merges(directory / "merges.txt", vocabulary)
    added = _added_tokens(directory / "tokenizer_config.json", len(vocabulary))
    known = SPECIAL_TOKENS[family_name]
    tokens = [*added, *(token for token in known if token not in added)]
    tokenizer = split_tokenizer(models.BPE(vocab=vocabulary, merges=merges), SPLIT_PATTERN, tokens)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


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


def write_tokenizer_files(
    directory: Path, merges: Iterable[tuple[str, str]] = (), family_name: str = "cosyvoice2"
) -> int:
    """Write vocab.json, merges.txt and tokenizer_config.json of a small byte-level BPE into `directory`.

    Each pair of `merges` (byte symbols or earlier merges) becomes one token. Returns the number of ids,
    special tokens of the family included; only Qwen2's own three stand in the files, as officially.
    """
    special_tokens = SPECIAL_TOKENS[family_name]
    pairs = list(merges)
    tokens = [*byte_symbols().values(), *("".join(pair) for pair in pairs)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    first = len(vocabulary)
    decoder = {
        str(first + i): {"content": token, "special": True} for i, token in enumerate(special_tokens[:3])
    }
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder}
    _write(directory / "vocab.json", json.dumps(vocabulary, ensure_ascii=False))
    _write(
        directory / "merges.txt",
        "".join(f"{left} {right}\n" for left, right in (("#version:", "0.2"), *pairs)),
    )
    _write(directory / "tokenizer_config.json", json.dumps(settings, indent=2))
    return first + len(special_tokens)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
