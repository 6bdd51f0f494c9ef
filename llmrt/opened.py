"""Opened: what the verbs of an open engine need, from the session to the tokenizer.

It builds requests and checks them; it does not wait for what becomes of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmrt.errors import RequestError
from llmrt.generation import Generation, GenerationFuture
from llmrt.intake import (
    Intake,
    Limits,
    Message,
    Prompt,
    as_conversations,
    as_prompts,
    default_params,
    is_conversation,
    params_per_prompt,
)
from llmrt.launch_plan import LaunchPlan
from llmrt.new_weights import WeightsSource, WeightsUpdate
from llmrt.sampling import SamplingParams
from llmrt.scheduler.request import Request
from llmrt.session import Session
from llmrt.tokenizer import Tokenizer


class Opened:
    """One opening of an engine. Used by any thread."""

    def __init__(
        self,
        session: Session,
        plan: LaunchPlan,
        tokenizer: Tokenizer,
        generation_config: Mapping[str, Any] | None,
    ) -> None:
        self.session = session
        self.plan = plan
        self.tokenizer = tokenizer
        eos = {*plan.model.eos_token_ids, *tokenizer.eos_token_ids}
        self.limits = Limits(
            vocab_size=plan.model.vocab_size,
            eos_token_ids=tuple(sorted(eos)),
            default_params=default_params(generation_config),
        )
        self._intake = Intake(tokenizer, self.limits, plan.options.seed)
        self._request_numbers = itertools.count()
        self._update_numbers = itertools.count()

    # ---- building: nothing is queued before everything is checked ----

    def prompts(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int,
    ) -> list[Generation]:
        """Return what is to be generated for one prompt or many."""
        items = as_prompts(prompts)
        paired = zip(items, params_per_prompt(params, len(items)), strict=True)
        return [self.prompt(item, p, priority) for item, p in paired]

    def chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int,
        template_options: Mapping[str, Any],
    ) -> list[Generation]:
        """Return what is to be generated for one conversation or many."""
        chats = as_conversations(messages)
        paired = zip(chats, params_per_prompt(params, len(chats)), strict=True)
        return [self._chat(chat, p, priority, template_options) for chat, p in paired]

    def streamed(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None,
        priority: int,
        template_options: Mapping[str, Any],
    ) -> Generation:
        """Return what is to be generated, piece by piece, for one prompt or conversation."""
        if is_conversation(prompt):
            return self._chat(prompt, params, priority, template_options, streaming=True)
        if template_options:
            names = ", ".join(sorted(template_options))
            raise TypeError(f"stream() has no option {names} for a prompt that is not a chat.")
        return self.prompt(prompt, params, priority, streaming=True)

    def scores(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        priority: int,
    ) -> list[Generation]:
        """Return what is to be computed to score one continuation or many."""
        given, wanted = as_prompts(prompts), as_prompts(continuations)
        return [
            self._generation(
                self._intake.scoring(self._new_request_id(), prompt, continuation, priority)
            )
            for prompt, continuation in pair_continuations(given, wanted)
        ]

    def prompt(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        *,
        request_id: str | None = None,
        streaming: bool = False,
    ) -> Generation:
        """Return what is to be generated for one prompt."""
        request, text = self._intake.request(
            request_id or self._new_request_id(), prompt, params, priority=priority
        )
        return self._generation(request, text, streaming=streaming)

    def _chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        priority: int,
        template_options: Mapping[str, Any],
        *,
        streaming: bool = False,
    ) -> Generation:
        text = self.tokenizer.apply_chat_template(messages, **template_options)
        request, _ = self._intake.request(
            self._new_request_id(), text, params, priority=priority, add_special_tokens=False
        )
        return self._generation(request, text, streaming=streaming)

    def _generation(
        self, request: Request, text: str | None = None, *, streaming: bool = False
    ) -> Generation:
        self.session.check(request)
        return Generation(
            request,
            text,
            self.tokenizer,
            on_cancel=self.aborter(request.request_id),
            streaming=streaming,
        )

    def _new_request_id(self) -> str:
        return f"request-{next(self._request_numbers)}"

    def weights_update(self, source: WeightsSource) -> WeightsUpdate:
        """Return what sends new weights to the workers."""
        number = next(self._update_numbers)
        return WeightsUpdate(source, self.plan.model, number, self.session.run)

    # ---- sending ----

    def send(self, generation: Generation) -> Generation:
        """Queue a request; return it, for its future and its stream."""
        self.send_all([generation])
        return generation

    def send_all(self, generations: Sequence[Generation]) -> list[GenerationFuture]:
        """Queue requests and return their futures: all of them, or none."""
        try:
            self.session.add(generations)
        except BaseException:  # Ctrl-C, or the engine ended: nobody will wait for those queued
            for generation in generations:
                generation.future.cancel()
            raise
        return [generation.future for generation in generations]

    def aborter(self, request_id: str) -> Callable[[], None]:
        """Return what aborts a request; it holds the session, not the engine."""
        session = self.session
        return lambda: session.abort(request_id)


def pair_continuations(
    prompts: Sequence[Prompt], continuations: Sequence[Prompt]
) -> list[tuple[Prompt, Prompt]]:
    """Return each continuation with its prompt; a single prompt has them all.

    Raises:
        RequestError: their numbers do not go together.
    """
    if len(prompts) == 1:
        prompts = [prompts[0]] * len(continuations)
    if len(prompts) != len(continuations):
        raise RequestError(
            f"{len(prompts)} prompts came with {len(continuations)} continuations; give one "
            "continuation for each prompt, or one prompt for all."
        )
    return list(zip(prompts, continuations, strict=True))
