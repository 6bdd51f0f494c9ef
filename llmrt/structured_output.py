"""From what a user asks of the form of an answer to a grammar that rank 0 follows.

The library behind it, llguidance, is an optional one. Here it only reads the grammar; the tokens
that may come next are worked out in the worker.
"""

from __future__ import annotations

import json

from llmrt.errors import ConfigError, RequestError
from llmrt.sampling import StructuredOutput


def compile_grammar(wanted: StructuredOutput) -> str:
    """Return the grammar of an answer, in llguidance's own notation.

    Raises:
        ConfigError: llguidance is not installed.
        RequestError: the schema, expression or grammar is not valid.
    """
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        raise ConfigError(
            "structured_output needs llguidance, which is not installed: "
            "pip install 'llmrt[structured]'."
        ) from error
    try:
        grammar = grammar_from(wanted.kind, _as_text(wanted.value))
        is_error, faults = LLMatcher.validate_grammar_with_warnings(grammar)
    except (ValueError, TypeError) as error:  # no JSON, for example
        raise _refusal(wanted, str(error)) from error
    if is_error:
        raise _refusal(wanted, "; ".join(faults))
    return grammar


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _refusal(wanted: StructuredOutput, fault: str) -> RequestError:
    return RequestError(f"structured_output.{wanted.kind} is not valid: {fault.strip()}")
