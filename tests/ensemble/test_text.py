"""What text is accepted, and that a refusal names the input, the value and the limit."""

from __future__ import annotations

import pytest

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.text import MAX_CHARACTERS, TextFrontend


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> TextFrontend:
    """A byte-level tokenizer without merges: one token for each byte of UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return TextFrontend(path)


@pytest.mark.parametrize("text", ["Hello.", "你好世界", "naïve 42", "3", "OK 👍"])
def test_speakable_text_becomes_one_id_for_each_byte(frontend: TextFrontend, text: str) -> None:
    assert len(frontend.tokens(text, "text")) == len(text.encode())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The text is empty"),
        (" \n\t", "The text is empty"),
        ("👍🎉", "holds no letter and no digit"),
        ("?!...", "holds no letter and no digit"),
        ("a" * 10_000, f"has 10000 characters; at most {MAX_CHARACTERS}"),
        ("a" * 200, "has 200 text tokens; at most 150"),
    ],
)
def test_unspeakable_text_is_refused_with_the_reason(frontend: TextFrontend, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        frontend.tokens(text, "text")


def test_the_message_says_which_text_it_was(frontend: TextFrontend) -> None:
    with pytest.raises(InputError, match="The transcript of the reference audio is empty"):
        frontend.tokens("", "transcript of the reference audio")
