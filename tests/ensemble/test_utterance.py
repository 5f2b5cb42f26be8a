"""A request is read whole: which voice, mode and options it means, and why it cannot be spoken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cosytriton_ensemble.errors import InputError
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, FAMILIES, Family
from cosytriton_ensemble.spec import Feed
from cosytriton_ensemble.utterance import Utterance, read_utterance
from cosytriton_ensemble.voice import Voice

CHECKPOINT = "cosyvoice2:" + "ab" * 32
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
TYPES = {"speed": np.float32, "seed": np.int64, "max_tokens": np.int32, "source_token_count": np.int32}


class Voices:
    """Anna said "what I said" in a recording; of Eva there is the embedding alone."""

    def get(self, name: str) -> Voice:
        embedding = np.full(192, 0.5, np.float32)
        if name == "anna":
            return Voice(embedding, np.full(20, 7, np.int32), np.ones((40, 80), np.float32), "what I said")
        if name == "eva":
            return Voice(embedding)
        raise InputError(f"There is no voice {name!r}. Present are: anna, eva.")


def encoded(**changes: Any) -> Feed:
    """A voice as `voice_encoder` gives it."""
    return {
        "prompt_tokens": np.full(25, 3, np.int32),
        "prompt_token_count": np.array([10], np.int32),
        "prompt_mel": np.zeros((50, 80), np.float32),
        "prompt_frame_count": np.array([20], np.int32),
        "speaker_embedding": np.ones(192, np.float32),
        "checkpoint": np.array([CHECKPOINT.encode()], np.object_),
    } | changes


def options(**values: Any) -> Feed:
    """Tensors of one entry, of the types that Triton gives."""
    return {name: _option(name, value) for name, value in values.items()}


def _option(name: str, value: Any) -> Any:
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], np.object_)
    return np.array([value], TYPES.get(name, np.bool_))


def read(feed: Feed, family: Family = COSYVOICE2) -> Utterance:
    return read_utterance(feed, family, Voices(), CHECKPOINT)


class TestVoice:
    def test_a_voice_that_was_sent_is_used_without_its_padding(self) -> None:
        utterance = read(options(text="Hello") | encoded())
        assert utterance.voice.tokens.tolist() == [3] * 10
        assert utterance.voice.mel.shape == (20, 80)
        assert (utterance.text, utterance.plan.mode) == ("Hello", "cross_lingual")

    def test_a_voice_is_found_by_its_name_with_its_transcript(self) -> None:
        utterance = read(options(text="Hello", voice_name="anna"))
        assert utterance.voice.tokens.tolist() == [7] * 20
        assert (utterance.plan.mode, utterance.plan.prompt_text) == ("zero_shot", "what I said")

    def test_a_transcript_of_the_request_counts_more(self) -> None:
        utterance = read(options(text="Hello", voice_name="anna", prompt_text="I said so"))
        assert utterance.plan.prompt_text == "I said so"

    def test_an_empty_name_is_none(self) -> None:
        assert read(options(text="Hello", voice_name="") | encoded()).voice.tokens.size == 10

    def test_a_voice_is_fitted_to_the_family(self) -> None:
        """A token of version 2 has two mel frames."""
        cut = encoded(prompt_frame_count=np.array([19], np.int32))
        assert read(options(text="Hello") | cut).voice.tokens.size == 9

    def test_a_voice_without_the_checkpoint_it_is_of_is_trusted(self) -> None:
        given = encoded()
        del given["checkpoint"]
        assert read(options(text="Hello") | given).voice.has_reference

    @pytest.mark.parametrize(
        ("feed", "message"),
        [
            (options(voice_name="nobody"), "no voice 'nobody'. Present are: anna, eva"),
            (options(voice_name="anna") | encoded(), r"has a voice and names another \('anna'\); give one"),
            (options(), "no voice: give voice_name, or the tensors of voice_encoder"),
            (
                encoded() | options(checkpoint="cosyvoice2:cdcd"),
                "encoded with another checkpoint .*Encode it",
            ),
            (encoded() | options(checkpoint="cosyvoice3:" + "ab" * 32), "another checkpoint"),
            (encoded(prompt_tokens=np.full(25, 6561, np.int32)), "prompt_tokens holds the ids 6561 to 6561"),
            (encoded(speaker_embedding=np.zeros(192, np.float32)), "speaker_embedding is all zeros"),
        ],
    )
    def test_no_voice_or_the_wrong_one_is_refused(self, feed: Feed, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read(options(text="Hello") | feed)


class TestMode:
    @EVERY_FAMILY
    def test_an_embedding_alone_speaks_without_reference(self, family: Family) -> None:
        utterance = read(options(text="Hello", voice_name="eva"), family)
        assert utterance.plan.mode == "sft"
        assert not utterance.voice.has_reference

    def test_an_instruction_is_followed(self) -> None:
        instruction = "Speak fast.<|endofprompt|>"
        utterance = read(options(text="Hello", voice_name="anna", instruct_text=instruction), COSYVOICE3)
        assert (utterance.plan.mode, utterance.plan.prompt_text) == ("instruct", instruction)

    def test_a_mode_can_be_asked_for(self) -> None:
        utterance = read(options(text="Hello", voice_name="anna", mode="cross_lingual"))
        assert (utterance.plan.mode, utterance.plan.prompt_text) == ("cross_lingual", "")

    def test_a_text_that_comes_by_pieces_is_a_text(self) -> None:
        utterance = read(options(text_stream="id", voice_name="anna"))
        assert (utterance.text, utterance.plan.mode) == ("", "zero_shot")

    @pytest.mark.parametrize(
        ("feed", "message"),
        [
            (options(voice_name="anna"), "There is no text to speak"),
            (options(text="Hello", voice_name="anna", mode="sing"), "no mode 'sing'; allowed are"),
            (options(text="Hello", voice_name="eva", mode="zero_shot"), "needs the transcript"),
            (options(text="Hello", voice_name="eva", prompt_text="So", mode="zero_shot"), "embedding alone"),
            (options(text="Hello", voice_name="anna", instruct_text="Fast."), "does not end with"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(self, feed: Feed, message: str) -> None:
        with pytest.raises(InputError, match=message):
            read(feed)


def source(ids: list[int], **count: int) -> Feed:
    return options(voice_name="anna", **count) | {"source_tokens": np.array(ids, np.int32)}


class TestConversion:
    def test_source_tokens_mean_a_conversion(self) -> None:
        utterance = read(source([1, 0, 6560]))
        assert (utterance.plan.mode, utterance.text) == ("conversion", "")
        assert utterance.source.tolist() == [1, 0, 6560]

    def test_they_come_without_their_padding(self) -> None:
        assert read(source([5, 6, 0, 0], source_token_count=2)).source.tolist() == [5, 6]

    def test_a_text_has_none(self) -> None:
        assert read(options(text="Hello", voice_name="anna")).source.size == 0

    @pytest.mark.parametrize(
        ("family", "ids"),
        [
            (COSYVOICE1, [4096]),
            (COSYVOICE2, [6561]),
            (COSYVOICE3, [5, 6561]),
            (COSYVOICE2, [5, -1]),
        ],
    )
    def test_ids_outside_the_codebook_are_refused(self, family: Family, ids: list[int]) -> None:
        reason = f"{min(ids)} to {max(ids)}; allowed are 0 to {family.speech_codes - 1}"
        with pytest.raises(InputError, match=f"source_tokens holds the ids {reason}"):
            read(source(ids), family)

    @pytest.mark.parametrize("count", [0, -1, 3])
    def test_a_count_outside_its_tensor_is_refused(self, count: int) -> None:
        with pytest.raises(InputError, match=f"source_tokens has {count} of 2 ids; allowed are 1 to 750"):
            read(source([5, 6], source_token_count=count))

    def test_no_ids_at_all_are_refused(self) -> None:
        with pytest.raises(InputError, match="source_tokens has 0 of 0 ids"):
            read(source([]))

    @EVERY_FAMILY
    def test_more_than_half_a_minute_is_refused(self, family: Family) -> None:
        """The flow would hear all of it at once."""
        longest = 30 * family.token_rate
        assert read(source([5] * longest), family).source.size == longest
        with pytest.raises(InputError, match=f"allowed are 1 to {longest}, which are 30 s. Convert"):
            read(source([5] * (longest + 1)), family)

    def test_padding_is_not_looked_at(self) -> None:
        assert read(source([5, -1], source_token_count=1)).source.tolist() == [5]

    def test_a_text_beside_them_is_refused(self) -> None:
        with pytest.raises(InputError, match="give the source's tokens, and no text"):
            read(source([5]) | options(text="Hello"))


class TestOptions:
    def test_they_have_defaults(self) -> None:
        utterance = read(options(text="Hello", voice_name="anna"))
        assert (utterance.speed, utterance.seed, utterance.max_tokens) == (1, 0, None)
        assert (utterance.normalise, utterance.markup, utterance.official) == (True, "strip", False)

    def test_they_are_read(self) -> None:
        given = options(speed=1.5, seed=2**40, max_tokens=7, normalise=False, keep_markup=True, official=True)
        utterance = read(options(text="Hello", voice_name="anna") | given)
        assert (utterance.speed, utterance.seed, utterance.max_tokens) == (1.5, 2**40, 7)
        assert (utterance.normalise, utterance.markup, utterance.official) == (False, "keep", True)

    @pytest.mark.parametrize("speed", [0.5, 0.9, 2.0])
    def test_speeds_up_to_the_limits_are_allowed(self, speed: float) -> None:
        given = read(options(text="Hello", voice_name="anna", speed=speed)).speed
        assert given == pytest.approx(speed)

    @pytest.mark.parametrize("speed", [0.4, 2.1, 0.0, -1.0, np.nan, np.inf])
    def test_other_speeds_are_refused(self, speed: float) -> None:
        with pytest.raises(InputError, match=rf"speed is {speed:g}; allowed are 0\.5 to 2\.0"):
            read(options(text="Hello", voice_name="anna", speed=speed))

    @pytest.mark.parametrize("limit", [0, -5])
    def test_a_limit_of_no_tokens_is_refused(self, limit: int) -> None:
        with pytest.raises(InputError, match=f"max_tokens is {limit}; give 1 or more, or leave it out"):
            read(options(text="Hello", voice_name="anna", max_tokens=limit))

    @pytest.mark.parametrize("name", ["text", "prompt_text", "instruct_text", "mode", "voice_name"])
    def test_text_that_is_not_utf8_is_refused_by_its_name(self, name: str) -> None:
        latin = options(**{name: "Grüße".encode("latin-1")})
        with pytest.raises(InputError, match=rf"'{name}' is not UTF-8 \(byte 2\); send UTF-8"):
            read(options(text="Hello", voice_name="anna") | latin)
