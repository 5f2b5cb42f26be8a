"""What the padding grid costs where requests are gathered to batches: frames that are computed for nobody."""

from __future__ import annotations

import numpy as np
import pytest

from cosytriton_ensemble.families import FAMILIES, Family
from cosytriton_ensemble.pipeline import pipeline_of

ALLOWED = 0.15
REQUESTS = 2000


@pytest.mark.parametrize("seconds", [2, 6, 15], ids=["commands", "sentences", "paragraphs"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_padding_costs_little_on_a_mix_of_texts_and_references(family: Family, seconds: float) -> None:
    """Pieces of text around so many seconds of speech, behind references of 3 to 10 s."""
    rng, pipeline = np.random.default_rng(0), pipeline_of(family)
    spoken = rng.gamma(3, seconds / 3, REQUESTS).clip(0.5, 60)
    heard = rng.uniform(3, 10, REQUESTS)
    given = computed = 0
    for dim, lengths in ((pipeline.tokens, spoken), (pipeline.prompt_tokens, heard)):
        counts = (lengths * family.token_rate).astype(int).tolist()
        given += sum(counts)
        computed += sum(dim.padded(count) for count in counts)
    assert given < computed < (1 + ALLOWED) * given
