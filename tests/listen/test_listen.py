"""A speech recogniser and a speaker encoder listen to the demo voice, as it is served.

The figures are those of a deliberately tiny voice, whose language model skips or doubles a word now and then:
its notice gives a word error rate of .298 over sentences like these, .199 over the grammatical ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cosytriton_client import Audio, Client, Voice

if TYPE_CHECKING:
    from cosytriton_ensemble.serving import RunningServer
    from cosytriton_export.checkpoint import Checkpoint

WER = 0.30  # word error rate over all sentences
WER_GRAMMATICAL = 0.25
WER_STREAMING = 0.05  # what streaming may add
# The recordings of the two voices are .55 and .60 alike, those of one voice .91. A spoken sentence is .30
# nearer to its own voice (none less than .20): a server that confuses voices could not come near this.
SIMILARITY_MARGIN = 0.20  # mean similarity to the own voice minus that to the other one

# The seeds count up from here. Of five first ones, which gave .25 to .33, this is the median.
FIRST_SEED = 3000
MODES = ("unary", "streamed")
PROMPTS = ("slt_1", "rms_2", "slt_3", "rms_2")  # taken in turn
OTHER = {"slt_1": "rms_2", "slt_3": "rms_2", "rms_2": "slt_1"}

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def words(text: str) -> list[str]:
    """Words in lower case, numbers digit by digit: "eight ten" and "810" are the same when spoken."""
    spelled = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", text.lower())
    return re.findall(r"[a-z']+", re.sub(r"\bten\b", "one zero", spelled))


def word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Words put in, left out or changed; at most all that were said, however much was heard."""
    row = list(range(len(heard) + 1))  # row[j]: the errors when heard[:j] stands for said[:i]
    for i, word in enumerate(said, 1):
        above, row = row, [i]
        for j, other in enumerate(heard, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (word != other)))
    return min(row[-1], len(said))


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("Hello, number zero two.", "Hello number 02", 0),
        ("Number eight ten.", "number 810", 0),
        ("My light is red.", "My light red.", 1),
        ("My light is red.", "Is my light is read?", 2),
        ("Thank you.", "One two three four five.", 2),
        ("Thank you.", "", 2),
    ],
)
def test_word_errors(said: str, heard: str, errors: int) -> None:
    assert word_errors(words(said), words(heard)) == errors


@dataclass(frozen=True)
class Sentence:
    """A sentence, and what became of it in one mode."""

    mode: str
    text: str
    grammatical: bool
    heard: str
    own: float  # similarity to the voice that it was spoken with
    other: float  # and to the other one

    @property
    def count(self) -> int:
        return len(words(self.text))

    @property
    def errors(self) -> int:
        return word_errors(words(self.text), words(self.heard))


def rate(sentences: Iterable[Sentence]) -> float:
    """The word error rate."""
    counts = [(sentence.errors, sentence.count) for sentence in sentences]
    return sum(errors for errors, _ in counts) / sum(count for _, count in counts)


def read_sentences() -> Iterator[tuple[str, bool]]:
    """The sentences, and whether they are grammatical: the paragraph of random words comes last."""
    text = Path(__file__).with_name("sentences.txt").read_text()
    for grammatical, paragraph in zip((True, False), text.split("\n\n"), strict=True):
        yield from ((line, grammatical) for line in paragraph.splitlines() if not line.startswith("#"))


Speak = Callable[[str, str, str, int], Path]


@pytest.fixture(scope="module")
def prompts(demo_checkpoint: Checkpoint) -> Path:
    return demo_checkpoint.path / "prompts"


@pytest.fixture(scope="module")
def speak(server: RunningServer, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speak]:
    """Speaks a text in a mode with a prompt and a seed into a WAV file."""
    folder = tmp_path_factory.mktemp("spoken")
    voices = {
        name: Voice.from_wav(prompts / f"{name}.wav", (prompts / f"{name}.txt").read_text().strip())
        for name in OTHER
    }

    def say(mode: str, text: str, prompt: str, seed: int) -> Path:
        if mode == "unary":
            audio = client.synthesize(text, voices[prompt], seed=seed)
        else:
            chunks = list(client.stream(text, voices[prompt], seed=seed))
            samples = np.concatenate([chunk.samples for chunk in chunks])
            audio = Audio(samples, sum(chunk.token_count for chunk in chunks), chunks[0].sample_rate)
        audio.save(path := folder / f"{mode}_{prompt}_{seed}.wav")
        return path

    with Client(server.grpc_url) as client:
        yield say


@pytest.fixture(scope="module")
def spoken(
    speak: Speak,
    prompts: Path,
    write_down: Callable[[Path], str],
    similarity: Callable[[Path, Path], float],
) -> dict[str, list[Sentence]]:
    """All sentences in both modes; prints what was heard."""
    results: dict[str, list[Sentence]] = {mode: [] for mode in MODES}
    for seed, (text, grammatical) in enumerate(read_sentences(), FIRST_SEED):
        prompt = PROMPTS[seed % len(PROMPTS)]
        for mode in MODES:
            speech = speak(mode, text, prompt, seed)
            own, other = (similarity(speech, prompts / f"{name}.wav") for name in (prompt, OTHER[prompt]))
            sentence = Sentence(mode, text, grammatical, write_down(speech), own, other)
            results[mode].append(sentence)
            print(f"{mode:8} {sentence.errors}/{sentence.count:<2} {text} | {sentence.heard}")
    return results


@pytest.mark.listen
def test_figures(spoken: dict[str, list[Sentence]]) -> None:
    """Prints them; the tests below judge."""
    table = [f"{'':10}{'WER, all':>10}{'grammatical':>13}{'own voice':>11}{'other':>7}"]
    for mode, sentences in spoken.items():
        own, other = (np.mean([getattr(s, name) for s in sentences]) for name in ("own", "other"))
        grammatical = rate(s for s in sentences if s.grammatical)
        table.append(f"{mode:10}{rate(sentences):>10.3f}{grammatical:>13.3f}{own:>11.2f}{other:>7.2f}")
    print("\n" + "\n".join(table))


@pytest.mark.listen
def test_words_are_understood(spoken: dict[str, list[Sentence]]) -> None:
    assert rate(spoken["unary"]) <= WER
    assert rate(s for s in spoken["unary"] if s.grammatical) <= WER_GRAMMATICAL


@pytest.mark.listen
def test_streaming_keeps_the_words(spoken: dict[str, list[Sentence]]) -> None:
    assert rate(spoken["streamed"]) <= rate(spoken["unary"]) + WER_STREAMING


@pytest.mark.listen
@pytest.mark.parametrize("mode", MODES)
def test_voice_is_that_of_the_prompt(mode: str, spoken: dict[str, list[Sentence]]) -> None:
    margins = [sentence.own - sentence.other for sentence in spoken[mode]]
    assert np.mean(margins) >= SIMILARITY_MARGIN


@pytest.mark.listen
@pytest.mark.parametrize("mode", MODES)
def test_demo_is_understood_without_an_error(
    mode: str, speak: Speak, write_down: Callable[[Path], str]
) -> None:
    from cosytriton_export.demo import PROMPT, SEED, TEXT

    assert words(write_down(speak(mode, TEXT, PROMPT, SEED))) == words(TEXT)


@dataclass(frozen=True)
class Run:
    """A profile that speaks the hundred sentences, with seeds that count up from one."""

    profile: str
    first_seed: int


RUNS = {"fp32": Run("cpu", 5000), "int8": Run("cpu_int8", 5000), "fp32 again": Run("cpu", 6000)}
WER_INT8 = 0.03  # what INT8 may add to the word error rate; compare what other seeds change
SIMILARITY_INT8 = 0.02  # and may take from the likeness to the prompt


@pytest.fixture(scope="module")
def precisions(
    int8_repository: Path,
    prompts: Path,
    serve: Callable[..., Any],
    write_down: Callable[[Path], str],
    similarity: Callable[[Path, Path], float],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[float, float]]:
    """Word error rate and mean similarity of each run; prints them."""
    folder = tmp_path_factory.mktemp("precisions")
    lines = Path(__file__).with_name("hundred.txt").read_text().splitlines()
    sentences = [line for line in lines if not line.startswith("#")]
    assert len(sentences) == 100
    results = {}
    for name, run in RUNS.items():
        errors, alike = 0, []
        with (
            serve(int8_repository, folder / f"{name}.log", f"--profile={run.profile}") as running,
            Client(running.grpc_url) as client,
        ):
            for number, text in enumerate(sentences):
                prompt, path = PROMPTS[number % len(PROMPTS)], folder / f"{name}_{number}.wav"
                transcript = (prompts / f"{prompt}.txt").read_text().strip()
                voice = Voice.from_wav(prompts / f"{prompt}.wav", transcript)
                client.synthesize(text, voice, seed=run.first_seed + number).save(path)
                errors += word_errors(words(text), words(write_down(path)))
                alike.append(similarity(path, prompts / f"{prompt}.wav"))
        count = sum(len(words(text)) for text in sentences)
        results[name] = errors / count, float(np.mean(alike))
        print(f"{name:11} word error rate {results[name][0]:.3f}, similarity {results[name][1]:.3f}")
    return results


@pytest.mark.listen
@pytest.mark.timeout(3000)
def test_int8_is_understood_as_well_as_fp32(precisions: dict[str, tuple[float, float]]) -> None:
    assert precisions["int8"][0] <= precisions["fp32"][0] + WER_INT8


@pytest.mark.listen
@pytest.mark.timeout(3000)
def test_int8_keeps_the_voice(precisions: dict[str, tuple[float, float]]) -> None:
    assert precisions["int8"][1] >= precisions["fp32"][1] - SIMILARITY_INT8
