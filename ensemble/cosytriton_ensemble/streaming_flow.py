"""The flow of CosyVoice 2 and 3 for streams: what later chunks need of earlier ones is kept.

Under the block mask no later block changes an earlier frame (arXiv 2412.10117). So a chunk need not be
computed from the beginning: its state is what each attention layer makes keys and values of, in each Euler
step, and the last frames of each causal convolution. Keys and values are made again from that, which costs a
fifth of computing the frames and needs a quarter of the memory.

A voice's prompt begins every piece of speech, so the state behind its last whole block is kept as well, by
its content. All states share one budget. A stream for which it does not suffice keeps nothing: each of its
chunks is computed from the beginning, by the same graph and so with the same result.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import onnxruntime as ort

from cosytriton_ensemble import names
from cosytriton_ensemble.families import Family
from cosytriton_ensemble.onnx_session import open_session, session_options, shrinking
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.profiles import Device
from cosytriton_ensemble.spec import Array, Feed
from cosytriton_ensemble.streaming import FlowCall
from cosytriton_ensemble.turns import Turns

ATTENTION, CONVOLUTION, OUT = "attention_state", "convolution_state", "_out"
TOKEN_END = "token_end"  # tokens, prompt included, that get frames; those behind them are heard alone
_PROMPT = (names.PROMPT_TOKENS, names.PROMPT_TOKEN_COUNT, names.PROMPT_MEL, names.SPEAKER_EMBEDDING)


@dataclass(slots=True, eq=False)
class State:
    """What is kept of the first `frames` mel frames, prompt included.

    `attention` has an array [capacity, steps, 2, width] for each layer, of which the first `frames` entries
    count; pages behind them that were never written take no memory. `convolution` is [steps, 2, n].
    """

    attention: list[Array]
    convolution: Array
    frames: int = 0


class StreamingFlow:
    """One graph, the states of its streams, and the prompts of the voices that were last heard.

    Args:
        session: A session with an exported streaming flow.
        family: The model's family.
        budget: Bytes that all states may take together.

    """

    def __init__(self, session: ort.InferenceSession, family: Family, budget: int) -> None:
        self.family, self._session, self._turns = family, session, Turns()
        self._run_options = shrinking("cpu:0" if session.get_providers()[0].startswith("CPU") else "")
        inputs = {value.name: value for value in session.get_inputs()}
        # A layer's frame, [steps, 2, width]; 8 bits where the layer reads no more.
        self._layers = {
            name: np.zeros(value.shape[1:], np.uint8 if "uint8" in value.type else np.float32)
            for name, value in inputs.items()
            if name.startswith(ATTENTION)
        }
        self._convolution_shape: list[int] = inputs[CONVOLUTION].shape
        self.frame_bytes = sum(frame.nbytes for frame in self._layers.values())
        pipeline = pipeline_of(family)
        self._longest = family.frames(pipeline.prompt_tokens.max + pipeline.tokens.max)
        self._budget = self._left = budget
        self._prompts: OrderedDict[bytes, State] = OrderedDict()  # the one last used stands at the end
        self._lock = threading.Lock()  # guards the two

    @classmethod
    def open(cls, path: Path, family: Family, *, device: Device, threads: int, budget: int) -> Self:
        """Load a graph; `threads` = 0 takes every core."""
        return cls(open_session(path, session_options(threads), device), family, budget)

    def stream(self, voice: Feed) -> FlowStream:
        """Begin a piece of speech; `voice` has the tensors of `Voice.feed`."""
        return FlowStream(self, {name: voice[name][None] for name in _PROMPT})

    # ---- what a stream does with it -----------------------------------------------------------------------

    def begin(self, voice: Feed, urgent: bool) -> State:
        """The state of a new stream: behind the prompt's whole blocks, where there is memory for it."""
        prompt, state = self._prompt(voice, urgent), self._empty(self._longest)
        if self.reserve(prompt.frames):
            state.convolution, state.frames = prompt.convolution, prompt.frames
            for target, source in zip(state.attention, prompt.attention, strict=True):
                target[: prompt.frames] = source
        return state

    def run(self, feed: Feed, state: State | None, end: int, urgent: bool) -> Array:
        """Compute the mel [n, mel bins] of the frames behind the state, up to the frame of token `end`.

        They become part of the state. Without one it is computed from the beginning, by one stream at a time.
        """
        with self._turns.take(urgent):
            return self._run(feed, state or self._empty(self.family.frames(end)), end)

    def reserve(self, frames: int) -> bool:
        """Take the memory of so many frames from the budget, also of prompts; False if it is not there."""
        needed = frames * self.frame_bytes
        with self._lock:
            kept = sum(prompt.frames for prompt in self._prompts.values()) * self.frame_bytes
            if needed > self._left + kept:
                return False
            while needed > self._left:
                _, oldest = self._prompts.popitem(last=False)
                self._left += oldest.frames * self.frame_bytes
            self._left -= needed
            return True

    def release(self, frames: int) -> None:
        """Give memory back to the budget."""
        with self._lock:
            self._left += frames * self.frame_bytes

    def nbytes(self) -> int:
        """Bytes that streams and prompts have of the budget."""
        with self._lock:
            return self._budget - self._left

    def _prompt(self, voice: Feed, urgent: bool) -> State:
        """The state behind the prompt's whole blocks, computed by itself: a hit changes no sample."""
        key = hashlib.sha256(b"".join(voice[name].tobytes() for name in _PROMPT)).digest()
        if (known := self._known(key)) is not None:
            return known
        with self._turns.take(urgent):  # another stream of the voice may have been here in the meantime
            return self._known(key) or self._make_prompt(voice, key)

    def _known(self, key: bytes) -> State | None:
        with self._lock:
            if key in self._prompts:
                self._prompts.move_to_end(key)
            return self._prompts.get(key)

    def _make_prompt(self, voice: Feed, key: bytes) -> State:
        block, count = self.family.hop_tokens, int(voice[names.PROMPT_TOKEN_COUNT].item())
        end = max(0, count - self.family.lookahead) // block * block
        frames = self.family.frames(end)
        if not (end and self.reserve(frames)):
            return self._empty(0)
        state = self._empty(frames)
        nothing = {names.TOKENS: np.zeros((1, 1), np.int32), names.TOKEN_COUNT: np.zeros((1, 1), np.int32)}
        try:
            self._run(voice | nothing, state, end)
        except Exception:
            self.release(frames)
            raise
        with self._lock:
            self._prompts[key] = state
        return state

    def _empty(self, capacity: int) -> State:
        attention = [np.empty((capacity, *frame.shape), frame.dtype) for frame in self._layers.values()]
        return State(attention, np.zeros(self._convolution_shape, np.float32))

    def _run(self, feed: Feed, state: State, end_token: int) -> Array:
        binding, past, end = self._session.io_binding(), state.frames, self.family.frames(end_token)
        for name, array in (feed | {TOKEN_END: np.array([[end_token]], np.int32)}).items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        binding.bind_cpu_input(CONVOLUTION, state.convolution)
        for name in (names.MEL, CONVOLUTION + OUT):
            binding.bind_output(name)
        for name, array in zip(self._layers, state.attention, strict=True):
            heard, made = array[:past], array[past:end]
            binding.bind_input(name, "cpu", 0, array.dtype, heard.shape, heard.ctypes.data)
            target = name.replace(ATTENTION, ATTENTION + OUT)
            binding.bind_output(target, "cpu", 0, array.dtype, made.shape, made.ctypes.data)
        self._session.run_with_iobinding(binding, self._run_options)
        outputs = binding.get_outputs()  # in the order in which they were bound
        state.convolution, state.frames = outputs[1].numpy(), end
        mel: Array = outputs[0].numpy()[0]
        return mel


class FlowStream:
    """The mel of one piece of speech, chunk by chunk; a context manager that gives its memory back."""

    def __init__(self, flow: StreamingFlow, voice: Feed) -> None:
        self._flow, self._voice = flow, voice
        self._prompt_tokens = int(voice[names.PROMPT_TOKEN_COUNT].item())
        self._state: State | None = None
        self._reserved = 0  # frames
        self._begun = False

    def mel(self, tokens: Sequence[int], call: FlowCall, urgent: bool = False) -> Array:
        """Make the frames [n, mel bins] that a call of `GridChunks` adds; `tokens` are all of the piece.

        `urgent`: nothing of the speech was heard yet, so that it goes before what others need later.
        """
        flow = self._flow
        if not self._begun:
            self._state, self._begun = flow.begin(self._voice, urgent), True
            self._reserved = self._state.frames
        ahead = 0 if call.finalize else flow.family.lookahead
        end = self._prompt_tokens + call.end - ahead
        if self._state is not None:
            new = flow.family.frames(end) - self._state.frames
            if flow.reserve(new):
                self._reserved += new
            else:
                self._forget()  # what it holds helps others more
        given = np.array([tokens[: call.end]], np.int32)
        said = {names.TOKENS: given, names.TOKEN_COUNT: np.array([[given.size]], np.int32)}
        mel = flow.run(self._voice | said, self._state, end, urgent)
        return mel[len(mel) - flow.family.frames(call.spoken) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()

    def _forget(self) -> None:
        self._state = None
        self._flow.release(self._reserved)
        self._reserved = 0
