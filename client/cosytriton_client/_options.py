"""How a text is to be spoken, beyond its words and its voice."""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np

from cosytriton_client._errors import InvalidInputError
from cosytriton_ensemble import names
from cosytriton_ensemble.modes import Mode

_SEEDS = 2**63  # int64, not negative


class Options(TypedDict, total=False):
    """Keyword arguments of every call that speaks; all may be left out."""

    seed: int  # the same seed gives the same samples (default 0)
    speed: float  # 0.5 to 2.0 (default 1)
    instruction: str  # how to speak; v2 and v3: ends with <|endofprompt|>
    mode: Mode  # default: the one that the inputs mean
    max_tokens: int  # of speech for each sentence
    normalise: bool  # spell numbers and signs out (default True)
    keep_markup: bool  # hand tags like <speak> to the model instead of dropping them (default False)
    official: bool  # behave like the official code where this kit differs on purpose (default False)


_TENSORS: dict[str, tuple[str, type]] = {
    "seed": (names.SEED, np.int64),
    "speed": (names.SPEED, np.float32),
    "instruction": (names.INSTRUCT_TEXT, np.object_),
    "mode": (names.MODE, np.object_),
    "max_tokens": (names.MAX_TOKENS, np.int32),
    "normalise": (names.NORMALISE, np.bool_),
    "keep_markup": (names.KEEP_MARKUP, np.bool_),
    "official": (names.OFFICIAL, np.bool_),
}


def option_tensors(options: Options) -> dict[str, Any]:
    """The options as input tensors [1, 1]; what a value may be is for the server to say.

    Raises:
        InvalidInputError: an option is unknown, or its value has another type.
    """
    tensors: dict[str, Any] = {}
    for option, value in options.items():
        if option not in _TENSORS:
            raise InvalidInputError(f"there is no option {option!r}; known are {', '.join(_TENSORS)}.")
        name, dtype = _TENSORS[option]
        if option == "seed" and not (isinstance(value, int) and 0 <= value < _SEEDS):
            raise InvalidInputError(f"seed {value}: allowed are 0 to 2**63 - 1.")
        try:
            given = value.encode() if isinstance(value, str) else value
            tensors[name] = np.array([[given]], dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInputError(f"{option}={value!r} cannot be sent ({error}).") from error
    return tensors
