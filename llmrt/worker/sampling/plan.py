"""SamplingPlan: what the parameters of one sequence ask of its logits, worked out once.

N listed ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from llmrt.errors import RankFailure
from llmrt.sampling import SamplingParams
from llmrt.worker.sampling.grammars import GrammarState
from llmrt.worker.sampling.penalties import TokenCounts, has_penalties
from llmrt.worker.sampling.processors import Processor, load_processors
from llmrt.worker.sampling.random_numbers import uniform
from llmrt.worker.sequence import SequenceState


class SamplingPlan:
    """Belongs to one SequenceState; ids outside the vocabulary are left out of it."""

    def __init__(
        self, sequence: SequenceState, vocab_size: int, grammar: GrammarState | None = None
    ) -> None:
        params = sequence.spec.params
        bias = {i: b for i, b in (params.logit_bias or {}).items() if 0 <= i < vocab_size}
        ends = (*sequence.spec.eos_token_ids, *(params.stop_token_ids or ()))
        self.sequence = sequence
        self.grammar = grammar
        """The form of the answer; None where it is free."""
        allowed = params.allowed_token_ids
        self.allowed_N = None if allowed is None else _ids(allowed, vocab_size)
        """None where every token is allowed."""
        self.bias_ids_N = _ids(bias, vocab_size)
        self.bias_N = torch.tensor(list(bias.values()), dtype=torch.float32)
        self.end_ids_N = _ids(ends, vocab_size)
        self.counts = TokenCounts(sequence, vocab_size) if has_penalties(params) else None
        self.processors: tuple[Processor, ...] = ()
        self.failure: RankFailure | None = None
        """Why this sequence cannot be sampled at all."""
        self._vocab_size = vocab_size
        self._load_processors()

    @property
    def params(self) -> SamplingParams:
        """The parameters of its request."""
        return self.sequence.spec.params

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been generated: the index of the one to sample."""
        return len(self.sequence.token_ids) - self.sequence.num_prompt_tokens

    @property
    def bans_ends(self) -> bool:
        """Whether the next token may not end the sequence."""
        return self.num_output_tokens < self.params.min_tokens

    @property
    def bans_any(self) -> bool:
        """Whether some tokens may not come next."""
        return self.bans_ends or bool(self.sequence.spec.bad_word_ids)

    @property
    def edits(self) -> bool:
        """Whether the logits of the next token differ from the model's."""
        return (
            self.bans_any
            or self.allowed_N is not None
            or len(self.bias_ids_N) > 0
            or self.counts is not None
            or bool(self.processors)
            or self.grammar is not None
        )

    def next_uniform(self) -> float:
        """Return the random number of the next token."""
        return uniform(self.sequence.spec.seed, self.num_output_tokens)

    def banned_ids(self) -> torch.Tensor:
        """Return what may not come next: the end of a bad word, or of the sequence itself."""
        output = self.sequence.output_token_ids
        last_ids = [w[-1] for w in self.sequence.spec.bad_word_ids if _ends_with(output, w[:-1])]
        bad_N = _ids(last_ids, self._vocab_size)
        return torch.cat((bad_N, self.end_ids_N)) if self.bans_ends else bad_N

    def _load_processors(self) -> None:
        try:
            self.processors = load_processors(self.sequence.spec.logits_processors)
        except Exception as error:
            self.failure = RankFailure.of(0, error)


def _ends_with(output: list[int], prefix: tuple[int, ...]) -> bool:
    return not prefix or tuple(output[-len(prefix) :]) == prefix


def _ids(token_ids: Iterable[int], vocab_size: int) -> torch.Tensor:
    return torch.tensor([i for i in token_ids if 0 <= i < vocab_size], dtype=torch.int64)
