"""SequenceStates for tests, made from what matters in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from llmrt.messages import NewSequence
from llmrt.sampling import SamplingParams
from llmrt.worker.sequence import SequenceState


def make_sequence(
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    *,
    seq_id: int = 0,
    seed: int = 0,
    eos: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    processors: Sequence[Callable[..., Any]] = (),
    **params: Any,
) -> SequenceState:
    """Return a sequence of this prompt and output so far; *params* are SamplingParams."""
    spec = NewSequence(
        seq_id=seq_id,
        token_ids=(*prompt, *output),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(max_tokens=None, **params),
        seed=seed,
        eos_token_ids=tuple(eos),
        bad_word_ids=tuple(tuple(word) for word in bad_words),
        logits_processors=cloudpickle.dumps(tuple(processors)) if processors else b"",
    )
    return SequenceState(spec=spec, token_ids=list(spec.token_ids))
