"""Grammars: which tokens may come next, where an answer must have a form.

The mask of a token is worked out on a thread of its own while the model runs the token before, so
that a step waits for it only where it takes longer than the model:

    sample token i ─► begin(mask i + 1) ─ ─ ─ ─ ─ ─ ┐ thread
                      forward of token i ─► logits ─┴─► mask ─► sample token i + 1
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from llmrt.worker.sequence import SequenceState

NUM_KEPT = 32
"""So many grammars stay compiled; requests often share one."""


class Grammars:
    """The grammars of one model, compiled for its tokenizer. Makes nothing before it is needed."""

    def __init__(self, tokenizer_file: str | None, vocab_size: int) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._thread: ThreadPoolExecutor | None = None
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], Any] = OrderedDict()

    def begin(self, sequence: SequenceState) -> GrammarState:
        """Begin to follow the grammar of a sequence, from its output so far."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmrt-grammar")
        output = tuple(sequence.output_token_ids)
        matcher = self._thread.submit(self._matcher_for, sequence, output)
        return GrammarState(self._thread, matcher, self._vocab_size)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    # ---- on the thread ----

    def _matcher_for(self, sequence: SequenceState, output: tuple[int, ...]) -> Any:
        key = (sequence.spec.grammar, sequence.spec.eos_token_ids)
        if key not in self._compiled:
            self._compiled[key] = self._compile(*key)
            if len(self._compiled) > NUM_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        matcher = self._compiled[key].deep_copy()
        matcher.consume_tokens(list(output))
        return matcher

    def _compile(self, grammar: str, eos_token_ids: tuple[int, ...]) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer_for(eos_token_ids), grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def _tokenizer_for(self, eos_token_ids: tuple[int, ...]) -> Any:
        from llguidance import LLTokenizer

        if eos_token_ids not in self._tokenizers:
            assert self._tokenizer_file is not None, "grammars need the tokenizer"
            with open(self._tokenizer_file, encoding="utf-8") as file:
                description = file.read()
            self._tokenizers[eos_token_ids] = LLTokenizer(
                description, n_vocab=self._vocab_size, eos_token=list(eos_token_ids)
            )
        return self._tokenizers[eos_token_ids]


class GrammarState:
    """How far one sequence has come in its grammar."""

    def __init__(self, thread: ThreadPoolExecutor, matcher: Future[Any], vocab_size: int) -> None:
        self._thread = thread
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask: Future[torch.Tensor] = thread.submit(self._next_mask)

    def allowed_V(self) -> torch.Tensor:
        """Return which tokens may come next, as booleans.

        Raises:
            ValueError: the grammar has become too complex to follow.
        """
        return self._mask.result()

    def advance(self, token_id: int) -> None:
        """Take in the token that came, and begin to work out the mask of the next."""
        self._mask = self._thread.submit(self._next_mask, token_id)

    def _next_mask(self, token_id: int | None = None) -> torch.Tensor:
        matcher = self._matcher.result()
        if token_id is not None:
            matcher.consume_token(token_id)
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed any further: {matcher.get_error()}")
        allowed_V = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return allowed_V.flatten()[: self._vocab_size].bool()
