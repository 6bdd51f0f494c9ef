"""Intake: turns what a caller gives (text, token ids, parameters) into checked Requests."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from typing_extensions import TypeIs

from llmrt.by_value import dumps
from llmrt.errors import RequestError
from llmrt.sampling import SamplingParams, StructuredOutput
from llmrt.scheduler.request import Request
from llmrt.structured_output import compile_grammar
from llmrt.tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""Text, token ids, or vLLM's dict with `prompt` or `prompt_token_ids`."""
Message: TypeAlias = "Mapping[str, Any]"

_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the model sets for every request."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams
    """Used where a caller gives no parameters."""


def default_params(generation_config: Mapping[str, Any] | None) -> SamplingParams:
    """Return vLLM's defaults, changed by what a model's generation_config.json sets."""
    config = generation_config or {}
    changes: dict[str, Any] = {
        name: config[name] for name in _GENERATION_DEFAULTS if config.get(name) is not None
    }
    if config.get("max_new_tokens") is not None:
        changes["max_tokens"] = config["max_new_tokens"]
    return SamplingParams(**changes)


class Intake:
    """Builds the requests of one session."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, seed: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._random = random.Random(seed)

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> tuple[Request, str | None]:
        """Return the request and, where there is one, its prompt as text.

        Raises:
            RequestError: the prompt or a parameter cannot be served by this model.
        """
        text, token_ids = self._prompt(prompt, add_special_tokens)
        params = params if params is not None else self._limits.default_params
        self._check_ids("prompt", token_ids)
        self._check_params(params)
        return self._build(request_id, token_ids, params, priority), text

    def scoring(
        self, request_id: str, prompt: Prompt, continuation: Prompt, priority: int
    ) -> Request:
        """Return the request that scores a continuation of a prompt, and generates nothing.

        Raises:
            RequestError: the continuation adds no token, or has nothing before it.
        """
        token_ids, first = self._joined(prompt, continuation)
        self._check_ids("prompt", token_ids)
        if first == len(token_ids):
            raise RequestError(f"the continuation {continuation!r} adds no token to its prompt.")
        if first == 0:
            raise RequestError(
                "the first token of a text has no probability: give the continuation a prompt of "
                "at least one token."
            )
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
        return replace(self._build(request_id, token_ids, params, priority), scores_from=first)

    def _joined(self, prompt: Prompt, continuation: Prompt) -> tuple[tuple[int, ...], int]:
        """Return the ids of both, and where those of the continuation begin."""
        text, ids = self._prompt(prompt, add_special_tokens=True)
        if isinstance(continuation, Mapping):
            continuation = _prompt_of_dict(continuation)
        if not isinstance(continuation, str):
            return (*ids, *_as_ids(continuation)), len(ids)
        if text is None:
            return (*ids, *self._tokenizer.encode(continuation, False)), len(ids)
        whole = self._tokenizer.encode(text + continuation)
        same = (i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b)
        return tuple(whole), next(same, min(len(ids), len(whole)))

    def _build(
        self, request_id: str, token_ids: tuple[int, ...], params: SamplingParams, priority: int
    ) -> Request:
        processors, form = params.logits_processors, params.structured_output
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=_for_workers(params),
            eos_token_ids=() if params.ignore_eos else self._limits.eos_token_ids,
            seed=params.seed if params.seed is not None else self._random.getrandbits(63),
            priority=priority,
            bad_word_ids=self._bad_word_ids(params.bad_words or ()),
            logits_processors=dumps(processors, "logits_processors") if processors else b"",
            grammar=self._grammar(form) if form is not None else "",
        )

    def _prompt(
        self, prompt: Prompt, add_special_tokens: bool
    ) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, Mapping):
            prompt = _prompt_of_dict(prompt)
        if isinstance(prompt, str):
            return prompt, tuple(self._tokenizer.encode(prompt, add_special_tokens))
        return None, _as_ids(prompt)

    def _check_ids(self, what: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._limits.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{what} holds token id {token_id}; this model's ids are 0 to {vocab_size - 1}."
                )

    def _check_params(self, params: object) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be a SamplingParams, not {type(params).__name__}.")
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", tuple(params.logit_bias or ()))
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._limits.vocab_size:
                raise RequestError(
                    f"{name}={getattr(params, name)} is above the vocabulary of "
                    f"{self._limits.vocab_size}; -1 asks for all."
                )

    def _grammar(self, form: StructuredOutput) -> str:
        if not self._limits.eos_token_ids:
            raise RequestError("this model has no EOS token, with which an answer could end.")
        return compile_grammar(form)

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word as it is tokenised at the start of a text and after a space."""
        found = {
            tuple(self._tokenizer.encode(spelled, False))
            for word in words
            for spelled in (word, f" {word.lstrip()}")
        }
        return tuple(sorted(found - {()}))


def _for_workers(params: SamplingParams) -> SamplingParams:
    """Return the parameters without what travels in another form."""
    if not params.logits_processors and params.structured_output is None:
        return params
    return replace(params, logits_processors=None, structured_output=None)


def as_prompts(prompts: object) -> list[Prompt]:
    """Return one prompt or many as a list.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, (str, Mapping)):
        return [cast("Prompt", prompts)]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"a prompt is a str or a list of token ids, not {type(prompts).__name__}."
        )
    items = cast("Sequence[Any]", prompts)
    if items and all(isinstance(item, int) for item in items):
        return [cast("Sequence[int]", items)]
    return list(items)


def is_conversation(prompt: object) -> TypeIs[Sequence[Message]]:
    """Return whether this is a list of messages, not a prompt."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        return False
    first = cast("Sequence[object]", prompt)[0]
    return isinstance(first, Mapping) and "role" in first


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """Return one conversation or many as a list.

    Raises:
        RequestError: it is neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(
            'messages is a list like [{"role": "user", "content": "..."}], '
            f"not {type(messages).__name__}."
        )
    given = cast("Sequence[Any]", messages)
    return [given] if is_conversation(given) else list(given)


def params_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    """Return one SamplingParams (or None) per prompt.

    Raises:
        RequestError: a list of another length was given.
    """
    if params is None or not isinstance(params, Sequence):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"{num_prompts} prompts came with {len(params)} SamplingParams.")
    return list(params)


def _as_ids(prompt: object) -> tuple[int, ...]:
    """Return token ids as plain ints, whatever integers they are."""
    if not isinstance(prompt, Iterable):
        raise RequestError(
            f"a prompt is a str or a list of token ids, not {type(prompt).__name__}."
        )
    return tuple(_as_id(item) for item in cast("Iterable[Any]", prompt))


def _as_id(item: Any) -> int:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise RequestError(f"the prompt holds {item!r}, which is not a token id.")
    return operator.index(item)


def _prompt_of_dict(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    for key in ("prompt_token_ids", "prompt"):
        if prompt.get(key) is not None:
            return prompt[key]
    raise RequestError(
        f"a prompt dict needs `prompt` or `prompt_token_ids`; this one has {sorted(prompt)}."
    )
