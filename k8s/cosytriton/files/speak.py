"""Speaks a sentence through a server, whole and as a stream. Arguments: its address, and a folder for TLS.

Exit status 0 when both are sound: finite samples, neither silent nor clipped to a rail, and no two different
numbers of speech tokens for one seed. The voice is a buzz, so that no recording is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cosytriton_client import Client, Voice

RATE = 16_000  # Hz of the reference
QUIET, LOUD = 1e-3, 1.0  # limits of the peak


def buzz(seconds: float = 1.5) -> Voice:
    """A sawtooth of 120 Hz with a little noise, as a reference."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(0).normal(0, 0.02, time.size)
    return Voice((0.1 * (2 * (120 * time % 1) - 1) + noise).astype(np.float32), RATE, "one two three")


def check(name: str, samples: npt.NDArray[np.float32], rate: int) -> None:
    """End with a message unless the samples are sound."""
    peak = float(np.abs(samples).max(initial=0))
    if not np.isfinite(samples).all() or not QUIET < peak <= LOUD:
        sys.exit(f"{name}: {samples.size} samples with a peak of {peak:g}; allowed is {QUIET:g} to {LOUD:g}")
    sys.stdout.write(f"{name}: {samples.size / rate:.2f} s of speech, peak {peak:.3f}\n")


def main(address: str, certificates: str | None = None) -> None:
    """Speak and check."""
    with Client(address, tls=Path(certificates) if certificates else None) as client:
        voice = buzz()
        whole = client.synthesize("One two three.", voice, seed=1, max_tokens=60)
        chunks = list(client.stream("One two three.", voice, seed=1, max_tokens=60))
    check("whole", whole.samples, whole.sample_rate)
    check("stream", np.concatenate([chunk.samples for chunk in chunks]), whole.sample_rate)
    tokens = sum(chunk.token_count for chunk in chunks)
    if tokens != whole.token_count:
        sys.exit(f"one seed, but {whole.token_count} speech tokens as a whole and {tokens} as a stream")


if __name__ == "__main__":
    main(*sys.argv[1:])
