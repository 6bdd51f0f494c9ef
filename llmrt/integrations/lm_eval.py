"""LlmrtLM: an open Engine as a model of EleutherAI's lm-evaluation-harness (extra `eval`).

    with Engine("path/or/hub-id") as llm:
        print(lm_eval.simple_evaluate(model=LlmrtLM(llm), tasks=["arc_easy"])["results"])

Texts are cut into tokens and windows as the harness does it for transformers with a `max_length` of
one less than the model's, so the two compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, cast

from llmrt.engine import Engine
from llmrt.errors import ConfigError
from llmrt.sampling import SamplingParams

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f"llmrt.integrations.lm_eval needs lm-eval ({error}): pip install 'llmrt[eval]'."
    ) from error

_SAMPLING_NAMES = frozenset(f.name for f in fields(SamplingParams))


class LlmrtLM(TemplateLM):
    """Answers the harness's three kinds of requests with an engine, which stays its owner's."""

    def __init__(self, engine: Engine, *, max_gen_toks: int = 256) -> None:
        """Take an open engine.

        Args:
            engine: Serves the requests; all of one kind are in it at once.
            max_gen_toks: Most tokens of an answer, for tasks that do not say.
        """
        super().__init__()
        self._engine = engine
        self._max_gen_toks = max_gen_toks

    # ---- tokens ----

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        found = self._engine.tokenizer.eos_token_id
        if found is None:
            raise ConfigError("this model's tokenizer names no EOS token, which the harness needs.")
        return found

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        bos = self._engine.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Tokens before the last one that is scored."""
        return self._engine.max_model_len - 1

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache knows the tokenizer by."""
        return self._engine.tokenizer.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text; BOS comes first where the model wants it."""
        return self._engine.tokenizer.encode(string, add_special_tokens is not False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as a prompt, its last message open if nothing is to follow it."""
        return self._engine.tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # ---- requests ----

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations; a context that is too long loses its beginning."""
        most = self.max_length + 1
        contexts = [_last(context, most - len(more)) for _, context, more in requests]
        scores = self._engine.score(contexts, [more for _, _, more in requests])
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for request, answer in zip(requests, answers, strict=True):
            key = request[0]
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of whole texts, window by window where they are long."""
        windows = [self._windows(request.args[0]) for request in requests]
        scored = iter(self._loglikelihood_tokens([w for own in windows for w in own]))
        totals = [sum(next(scored)[0] for _ in own) for own in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[None, list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        return [(None, *make_disjoint_window(window)) for window in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate for every context until one of its stop strings."""
        prompts, params = [], []
        for request in requests:
            context, options = cast("tuple[str, dict[str, Any]]", request.args)
            asked = self._sampling_params(options)
            assert asked.max_tokens is not None
            room = max(1, self.max_length - asked.max_tokens)
            prompts.append(_last(self.tok_encode(context), room))
            params.append(asked)
        texts = [output.text for output in self._engine.generate(prompts, params)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling_params(self, options: dict[str, Any]) -> SamplingParams:
        given: dict[str, Any] = dict(normalize_gen_kwargs(options, self._max_gen_toks))
        stops = [stop for stop in given.pop("until") if stop]
        max_tokens = given.pop("max_gen_toks")
        given.pop("do_sample", None)
        unknown = given.keys() - _SAMPLING_NAMES
        if unknown:
            raise ConfigError(
                f"the task asks for {', '.join(sorted(unknown))}, which SamplingParams does not "
                "have."
            )
        return SamplingParams(**{"temperature": 0.0, **given}, stop=stops, max_tokens=max_tokens)


def _last(token_ids: list[int], count: int) -> list[int]:
    """Return the last tokens of a context that is too long."""
    return token_ids[max(0, len(token_ids) - count) :]
