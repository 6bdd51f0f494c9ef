"""SequenceState: what a worker keeps of one sequence between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmrt.messages import NewSequence


@dataclass(slots=True)
class SequenceState:
    """Tokens and block table of one running sequence; every rank holds the same."""

    spec: NewSequence
    token_ids: list[int]
    """Prompt and output so far."""
    block_ids: list[int] = field(default_factory=list[int])
    """Its block table: token i lies in block `block_ids[i // block_size]`."""

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the tokens are the prompt."""
        return self.spec.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.spec.num_prompt_tokens :]
