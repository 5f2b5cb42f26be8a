"""Every family, mode, way of answering and protocol: each cell speaks or says why not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosytriton_client import Audio, Client, InvalidInputError, Request, Timeout, UnsupportedError, Voice
from cosytriton_client._grpc import GrpcTransport
from cosytriton_ensemble.families import COSYVOICE1, COSYVOICE2, COSYVOICE3, FAMILIES, Family

TEXT = "Hello there, my friend, this is voice number five."
MARK = "<|endofprompt|>"
SPEAKER = "中文女"  # the writer of untrained checkpoints puts her into spk2info.pt, without a reference
EVERY_FAMILY = tuple(FAMILIES.values())
ALL, LATER = EVERY_FAMILY, (COSYVOICE2, COSYVOICE3)


@dataclass(frozen=True)
class Case:
    """A row of the table: what is asked, and in `refused` the families that refuse it with `reason`."""

    name: str
    voice: str = "reference"  # "reference", "silent about its words", or a name
    options: dict[str, Any] = field(default_factory=dict)
    source: bool = False
    families: tuple[Family, ...] = ALL
    reason: str = ""  # "": it speaks


CASES = (
    Case("zero_shot"),
    Case("cross_lingual", "silent about its words"),
    Case("cross_lingual by name of the mode", options={"mode": "cross_lingual"}),
    Case("instruct", options={"instruction": f"Speak fast.{MARK}"}, families=LATER),
    Case("instruct a speaker", SPEAKER, {"instruction": "A fiery rebel."}, families=(COSYVOICE1,)),
    Case("sft", SPEAKER),
    Case("conversion", source=True),
    Case("slow", options={"speed": 0.5}),
    Case("fast", options={"speed": 2.0}),
    Case("official", options={"official": True}),
    Case("as written", options={"normalise": False}),
    Case("instruction without end", options={"instruction": "Fast."}, families=LATER, reason="Append it"),
    Case(
        "instruct a speaker without reference",
        SPEAKER,
        {"instruction": f"Fast.{MARK}"},
        families=LATER,
        reason="follows an instruction in the voice of a reference recording",
    ),
    Case(
        "zero_shot without words",
        "silent about its words",
        {"mode": "zero_shot"},
        reason="needs the transcript",
    ),
    Case("zero_shot of a speaker", SPEAKER, {"mode": "zero_shot"}, reason="needs the transcript"),
    Case("conversion to a speaker", SPEAKER, source=True, reason="continues a reference recording"),
    Case("unknown speaker", "nobody", reason=f"There is no voice 'nobody'. Present are: .*{SPEAKER}"),
    Case("unknown mode", options={"mode": "sing"}, reason="no mode 'sing'; allowed are zero_shot"),
    Case("too fast", options={"speed": 2.5}, reason="speed is 2.5; allowed are 0.5 to 2.0"),
)
CELLS = [(family, case) for family in EVERY_FAMILY for case in CASES if family in case.families]
each_family = pytest.mark.parametrize("rig", EVERY_FAMILY, indirect=True, ids=list(FAMILIES))


@dataclass
class Rig:
    """A server of one family."""

    family: Family
    server: Any
    reference: Voice
    source: Voice

    def voice(self, kind: str) -> Voice | str:
        if kind == "silent about its words":
            return Voice(self.reference.audio, self.reference.sample_rate)
        return self.reference if kind == "reference" else kind


@pytest.fixture(scope="module")
def rigs(
    repositories: Callable[[Family], Path],
    serve: Any,
    austen: Voice,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Family], Rig]]:
    """Starts the server of a family when it is first asked for."""
    rate, folder = austen.sample_rate, tmp_path_factory.mktemp("families")
    reference = Voice(austen.audio[: 3 * rate], rate, "he might even have been made amiable")
    source = Voice(austen.audio[3 * rate : 5 * rate], rate)
    with ExitStack() as servers:

        @lru_cache
        def start(family: Family) -> Rig:
            log = folder / f"{family.name}.log"
            server = servers.enter_context(serve(repositories(family), log))
            return Rig(family, server, reference, source)

        yield start


@pytest.fixture
def rig(request: pytest.FixtureRequest, rigs: Callable[[Family], Rig]) -> Rig:
    return rigs(request.param)


def speak(client: Client, rig: Rig, case: Case, streamed: bool) -> list[Audio]:
    voice: Any = rig.voice(case.voice)
    if case.source:
        call: Any = client.convert_stream if streamed else client.convert
        answer = call(rig.source, voice, **case.options)
    else:
        call = client.stream if streamed else client.synthesize
        answer = call(TEXT, voice, **case.options)
    return list(answer) if streamed else [answer]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(
    ("rig", "case"), CELLS, indirect=["rig"], ids=[f"{family.name}-{case.name}" for family, case in CELLS]
)
def test_each_cell_speaks_or_says_why_not(rig: Rig, case: Case, streamed: bool, protocol: str) -> None:
    family = rig.family
    with Client(rig.server.grpc_url if protocol == "grpc" else rig.server.http_url) as client:
        if case.reason:
            with pytest.raises(InvalidInputError, match=case.reason):
                speak(client, rig, case, streamed)
            return
        chunks = speak(client, rig, case, streamed)
    samples = np.concatenate([chunk.samples for chunk in chunks])
    assert {chunk.sample_rate for chunk in chunks} == {family.sample_rate}
    assert chunks[-1].finish_reason == "end"
    assert np.isfinite(samples).all()
    assert np.abs(samples).max() > 0.005
    tokens, speed = sum(chunk.token_count for chunk in chunks), case.options.get("speed", 1)
    # v1's streamed hops of 100 tokens round down by a quarter of a frame each.
    expected = family.samples(tokens) / speed
    assert abs(samples.size - expected) <= family.mel_hop * (1 + tokens // 100 + (speed != 1))
    if speed == 1 and not (streamed and family.fade_frames):
        assert samples.size == family.samples(tokens)


def test_every_family_has_a_row_for_every_mode() -> None:
    """The table is whole: no family and mode without a cell that speaks."""
    spoken = {(family.name, case.name.split()[0]) for family, case in CELLS if not case.reason}
    modes = ("zero_shot", "cross_lingual", "instruct", "sft", "conversion")
    assert {(family.name, mode) for family in EVERY_FAMILY for mode in modes} <= spoken


@each_family
def test_text_by_pieces_is_spoken_over_grpc_and_refused_over_http(rig: Rig) -> None:
    pieces = ["Hello the", "re, my friend, ", "this is voice", " number five. And", " here is more of it."]
    with Client(rig.server.grpc_url) as client:
        chunks = list(client.stream(iter(pieces), rig.reference))
    samples = sum(chunk.samples.size for chunk in chunks)
    assert abs(samples - rig.family.samples(sum(c.token_count for c in chunks))) <= 2 * rig.family.mel_hop
    with Client(rig.server.http_url) as client, pytest.raises(UnsupportedError, match="use gRPC"):
        list(client.stream(iter(pieces), rig.reference))


@each_family
def test_speech_begins_before_the_text_ends(rig: Rig) -> None:
    """The first chunk comes while the caller still holds the last piece back."""
    heard: list[Audio] = []

    def pieces() -> Iterator[str]:
        yield from ("The first sentence has quite a lot of words to say, as you hear. ",) * 3
        deadline = time.monotonic() + 20
        while not heard and time.monotonic() < deadline:
            time.sleep(0.05)
        assert heard, "nothing was heard while the text was still coming"
        yield " And this is the end of it."

    with Client(rig.server.grpc_url) as client:
        for chunk in client.stream(pieces(), rig.reference):
            heard.append(chunk)
    assert len(heard) > 1


@each_family
@pytest.mark.parametrize("text", [[], [""], ["  ", "\n"], ["?!"]])
def test_a_stream_of_nothing_is_refused(rig: Rig, text: list[str]) -> None:
    with (
        Client(rig.server.grpc_url) as client,
        pytest.raises(InvalidInputError, match="empty|nothing to say"),
    ):
        list(client.stream(iter(text), rig.reference))


@each_family
def test_a_caller_whose_text_fails_gets_the_failure(rig: Rig) -> None:
    def broken() -> Iterator[str]:
        yield "Hello there, "
        raise RuntimeError("the language model has gone")

    with Client(rig.server.grpc_url) as client:
        with pytest.raises(RuntimeError, match="has gone"):
            list(client.stream(broken(), rig.reference))
        assert client.synthesize("Hello.", rig.reference).token_count > 0


@each_family
def test_speech_that_reaches_its_limit_before_its_text_has_come(rig: Rig) -> None:
    """Each piece ends at `max_tokens`; the text goes on, and nobody waits for ever."""

    def slow() -> Iterator[str]:
        for _ in range(3):
            yield from ("The weather is fine ", "today and tomorrow, ", "so we walk. ")
            time.sleep(0.3)

    with Client(rig.server.grpc_url) as client:
        chunks = list(client.stream(slow(), rig.reference, max_tokens=10))
    assert {chunk.finish_reason for chunk in chunks} <= {"", "length", "end"}
    assert sum(chunk.token_count for chunk in chunks) >= 10


@each_family
def test_a_stream_of_text_cannot_be_joined_by_another(rig: Rig) -> None:
    """Two requests with one stream id: the second is refused, the first one speaks on."""
    transport = GrpcTransport("localhost", rig.server.grpc_port, Timeout())
    stream = np.array([[b"1"]], np.object_)
    with Client(rig.server.grpc_url) as client:
        voice = {"voice_name": np.array([[SPEAKER.encode()]], np.object_), "text_stream": stream}
        go_on = threading.Event()

        def rest() -> Iterator[dict[str, Any]]:
            yield {"text_stream": stream, "text": np.array([[b"Hello there, my friend. "]], np.object_)}
            go_on.wait(20)
            yield {"text_stream": stream, "text_end": np.array([[True]])}

        first = transport.stream(Request("tts_stream", voice, "first"), rest())
        with ThreadPoolExecutor(1) as pool:
            heard = pool.submit(lambda: sum(answer["sample_count"].item() for answer in first))
            time.sleep(0.5)
            with pytest.raises(InvalidInputError, match="'1' is in use"):
                list(transport.stream(Request("tts_stream", voice, "second")))
            go_on.set()
            assert heard.result() > 0
        assert client.synthesize("Hello.", SPEAKER).token_count > 0
    transport.close()


@each_family
def test_seed_decides_in_every_family(rig: Rig) -> None:
    with Client(rig.server.grpc_url) as client:
        one, same, other = (client.synthesize(TEXT, rig.reference, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.samples, same.samples)
    assert one.samples.size != other.samples.size or not np.array_equal(one.samples, other.samples)


@each_family
def test_chunks_join_without_a_step_and_the_end_has_no_click(rig: Rig, austen: Voice) -> None:
    """At a border, and in the last 40 ms, the sound moves no faster than it does elsewhere."""
    source = Voice(austen.audio[: 7 * austen.sample_rate], austen.sample_rate)
    with Client(rig.server.grpc_url) as client:
        chunks = [chunk.samples for chunk in client.convert_stream(source, rig.reference)]
    samples = np.concatenate(chunks)
    steps = np.abs(np.diff(samples))
    usual = np.percentile(steps, 99.9)
    assert len(chunks) > 1
    for border in np.cumsum([len(chunk) for chunk in chunks])[:-1]:
        assert steps[border - 1] <= usual
    assert steps[-rig.family.sample_rate // 25 :].max() <= usual
    assert abs(samples[-1]) <= usual  # behind it there is silence
