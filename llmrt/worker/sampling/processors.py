"""The user's own logits processors: unpickled, called, and kept from harming other sequences."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import torch

from llmrt.worker.sequence import SequenceState

Processor = Callable[[SequenceState, torch.Tensor], Any]


def load_processors(payload: bytes) -> tuple[Processor, ...]:
    """Return the pickled functions, each ready to be called with a sequence and its logits.

    Raises:
        Exception: whatever unpickling them raises.
    """
    return tuple(_adapt(function) for function in pickle.loads(payload)) if payload else ()


def run_processors(
    processors: tuple[Processor, ...], sequence: SequenceState, logits_V: torch.Tensor
) -> torch.Tensor:
    """Return the logits after every processor, in order.

    Raises:
        TypeError: a processor returned something else than logits.
        Exception: whatever a processor raises.
    """
    for processor in processors:
        result = processor(sequence, logits_V)
        if not isinstance(result, torch.Tensor) or result.shape != logits_V.shape:
            shown = f"shape {list(result.shape)}" if hasattr(result, "shape") else repr(result)
            raise TypeError(
                f"A logits processor must return the logits, of shape {list(logits_V.shape)}; it "
                f"returned {shown}."
            )
        logits_V = result.to(device=logits_V.device, dtype=logits_V.dtype)
    return logits_V


def _adapt(function: Callable[..., Any]) -> Processor:
    if _num_required(function) == 3:
        return lambda sequence, logits_V: function(
            sequence.token_ids[: sequence.num_prompt_tokens],
            sequence.output_token_ids,
            logits_V,
        )
    return lambda sequence, logits_V: function(sequence.output_token_ids, logits_V)


def _num_required(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return 2  # a builtin that does not tell: it is given the shorter form
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)
