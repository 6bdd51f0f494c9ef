"""SamplingParams: how the tokens of a request are chosen, and when it ends. Names are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from llmrt.errors import RequestError

GREEDY_TEMPERATURE = 1e-5
"""Below this, float32 leaves a distribution no second choice: such a request is greedy."""

LogitsProcessor = Callable[..., Any]
"""`f(output_ids, logits_V) -> logits_V` or `f(prompt_ids, output_ids, logits_V) -> logits_V`."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form that an answer must have: give one of these. Needs the extra `structured`.

    Raises:
        RequestError: none was given, or several.
    """

    json_schema: str | Mapping[str, Any] | type | None = None
    """A JSON schema, as text or as a dict; or a pydantic model, whose schema is taken."""
    regex: str | None = None
    """A regular expression for the whole answer."""
    choice: Sequence[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """A context-free grammar, in Lark's notation or GBNF."""

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise RequestError(
                "StructuredOutput takes one of json_schema, regex, choice and grammar; it was "
                f"given {', '.join(given) or 'none'}."
            )
        self._normalise()

    @property
    def kind(self) -> Literal["json_schema", "regex", "choice", "grammar"]:
        """Which of them was given."""
        for name in ("json_schema", "regex", "choice"):
            if getattr(self, name) is not None:
                return name
        return "grammar"

    @property
    def value(self) -> Any:
        """What was given."""
        return getattr(self, self.kind)

    def _normalise(self) -> None:
        if hasattr(self.json_schema, "model_json_schema"):
            schema: Any = self.json_schema
            object.__setattr__(self, "json_schema", schema.model_json_schema())
        if self.choice is not None:
            is_text = isinstance(self.choice, str)
            object.__setattr__(self, "choice", () if is_text else tuple(self.choice))
            if not self.choice or not all(type(c) is str and c for c in self.choice):
                raise RequestError("choice must be a list of strings that are not empty.")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and type(value) is not str:
                raise RequestError(f"{name} must be a string, not {type(value).__name__}.")
        if not isinstance(self.json_schema, (str, Mapping, type(None))):
            raise RequestError(
                "json_schema must be a dict, its text, or a pydantic model, not "
                f"{type(self.json_schema).__name__}."
            )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request. Frozen: make a changed copy with `dataclasses.replace`.

    Raises:
        RequestError: a value is out of its range; the message names the field and what it accepts.
    """

    n: int = 1
    """Number of completions to generate for the prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 (or less than 1e-5) is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Keep this many tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Keep tokens at least this probable, relative to the most probable one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that is in the output so far."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as it is in the output so far."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of the tokens of prompt and output so far."""
    seed: int | None = None
    """Makes this request reproducible, whatever else is in the batch."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; the text ends before the first of them."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the completion."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Most tokens to generate; None goes on to the model's length limit."""
    min_tokens: int = 0
    """No end (EOS, stop ids, stop strings) before this many tokens."""
    logprobs: int | None = None
    """Return log-probabilities: the sampled token's and this many most likely ones'; -1 is all."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None = None
    """Sample from these ids only."""
    bad_words: Sequence[str] | None = None
    """Words that must not be generated."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """End the text after the stop string, not before it."""
    detokenize: bool = True
    """False leaves `text` empty and saves the work."""
    logits_processors: Sequence[LogitsProcessor] | None = None
    """Functions applied to the logits before sampling."""
    structured_output: StructuredOutput | None = None
    """The form that the text must have. Masks every other token, after all that changes logits."""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_stops()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The `stop` strings, always as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def changed_fields(self) -> tuple[str, ...]:
        """Return the names of the fields that differ from their default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    def with_max_tokens(self, max_tokens: int) -> SamplingParams:
        """Return a copy that generates at most *max_tokens*."""
        return replace(self, max_tokens=max_tokens)

    def _normalise(self) -> None:
        for name in (
            "stop_token_ids",
            "allowed_token_ids",
            "bad_words",
            "logits_processors",
            "stop",
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)

    def _check_ranges(self) -> None:
        _require_int("n", self.n, at_least=1)
        _require_int("top_k", self.top_k, at_least=0)
        _require_int("min_tokens", self.min_tokens, at_least=0)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, at_least=0)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it."
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), at_least=-1)
        if self.seed is not None:
            _require_int("seed", self.seed, at_least=-(2**63))
        _require_number("temperature", self.temperature, 0.0, math.inf)
        _require_number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_number(
            "repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_below=True
        )

    def _check_stops(self) -> None:
        for text in self.stop_strings:
            if type(text) is not str or not text:
                raise RequestError(
                    f"stop={self.stop!r} holds {text!r}; a stop must be a string that is not empty."
                )
        if self.stop_strings and not self.detokenize:
            raise RequestError(
                "stop strings need the text: leave detokenize=True, or use stop_token_ids."
            )
        if self.structured_output is not None and self.ignore_eos:
            raise RequestError(
                "an answer of a given form ends with EOS: structured_output and ignore_eos=True "
                "exclude each other."
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                _require_int(f"{name} entry", token_id, at_least=0)
        for token_id in self.logit_bias or ():
            _require_int("logit_bias key", token_id, at_least=0)


def _require_int(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, not {value!r}.")
    if value < at_least:
        raise RequestError(f"{name} must be at least {at_least}, not {value}.")


def _require_number(
    name: str, value: object, low: float, high: float, *, open_below: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {value!r}.")
    above_low = value > low if open_below else value >= low
    if not (above_low and value <= high and math.isfinite(value)):
        border = "(" if open_below else "["
        raise RequestError(f"{name} must be in {border}{low:g}, {high:g}], not {value}.")
