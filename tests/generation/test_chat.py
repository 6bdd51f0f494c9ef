"""Conversations: what of them reaches the model, and what of them it need not compute again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llmrt import AsyncEngine, Engine, RequestError, SamplingParams
from tests.support.scripts import copy_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
TOOL_TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if thinking %}<think>{% endif %}{% if add_generation_prompt %}:{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "<|user|>hi<|end|><|assistant|>"),
        ({"add_generation_prompt": False}, "<|user|>hi<|end|>"),
        ({"continue_final_message": True}, "<|user|>hi"),
        ({"chat_template": TOOL_TEMPLATE}, "<s>hi:"),
        ({"chat_template": TOOL_TEMPLATE, "tools": TOOLS}, "<s>[look_up]hi:"),
        ({"chat_template": TOOL_TEMPLATE, "thinking": True}, "<s>hi<think>:"),
    ],
)
def test_an_option_does_not_reach_the_template(
    llm: Engine, options: dict[str, Any], prompt: str
) -> None:
    output = llm.chat(HELLO, GREEDY, **options)[0]
    assert output.prompt == prompt
    assert list(output.prompt_token_ids) == llm.tokenizer.encode(prompt, False)
    streamed = llm.stream(HELLO, GREEDY, **options)
    assert "".join(i.text for i in streamed) == output.text


def test_a_chat_begins_twice(llm: Engine) -> None:
    bos = llm.tokenizer.bos_token_id
    chatted = llm.chat(HELLO, GREEDY, chat_template=TOOL_TEMPLATE)[0]
    assert chatted.prompt_token_ids.count(bos or 0) == 1
    rendered = llm.tokenizer.apply_chat_template(HELLO, chat_template=TOOL_TEMPLATE)
    assert llm.generate(rendered, GREEDY)[0].prompt_token_ids == chatted.prompt_token_ids


def test_parts_of_a_message_are_lost_or_guessed(llm: Engine) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    output = llm.chat([{"role": "user", "content": parts}], GREEDY)[0]
    assert output.prompt == "<|user|>h\ni<|end|><|assistant|>"
    with pytest.raises(RequestError, match="image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], GREEDY)


def test_conversations_are_answered_out_of_order(llm: Engine) -> None:
    chats = [[{"role": "user", "content": c}] for c in ("a", "b", "c", "d")]
    params = [SamplingParams(temperature=0, max_tokens=i + 1, ignore_eos=True) for i in range(4)]
    outputs = llm.chat(chats, params)
    assert [o.prompt for o in outputs] == [f"<|user|>{c}<|end|><|assistant|>" for c in "abcd"]
    assert [len(o.token_ids) for o in outputs] == [1, 2, 3, 4]
    assert [o.text for o in outputs] == [
        llm.chat(c, p)[0].text for c, p in zip(chats, params, strict=True)
    ]
    assert llm.chat([]) == []


def test_a_turn_computes_the_turns_before_it_again(tiny_model: Path) -> None:
    chat = [{"role": "user", "content": "Tell me about rivers, please, and do not be brief."}]
    cached: list[int] = []
    with Engine(tiny_model) as llm, Engine(tiny_model, prefix_caching=False) as fresh:
        for _ in range(4):
            output = llm.chat(chat, GREEDY)[0]
            assert output.token_ids == fresh.chat(chat, GREEDY)[0].token_ids
            cached.append(output.num_cached_tokens)
            num_before = len(output.prompt_token_ids)
            chat = [
                *chat,
                {"role": "assistant", "content": "x" * 20},
                {"role": "user", "content": "m"},
            ]
            assert output.num_cached_tokens <= num_before - 1
    assert cached[0] == 0
    assert cached == sorted(cached)
    assert cached[-1] >= 80


def test_a_conversation_that_is_none_reaches_the_template(llm: Engine) -> None:
    for messages in ("hi", 3, [{"content": "hi"}], ["hi"], [[]]):
        with pytest.raises(RequestError):
            llm.chat(messages, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tools"):
        llm.stream("not a chat", GREEDY, tools=TOOLS)
    with pytest.raises(RequestError, match="ask for one"):
        llm.chat(HELLO, GREEDY, add_generation_prompt=True, continue_final_message=True)
    assert llm.is_healthy()


def test_a_model_without_a_template_fails_obscurely(tiny_model: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_model, tmp_path / "m", tokenizer_config={"chat_template": None})
    with Engine(model) as llm:
        with pytest.raises(RequestError, match=r"no chat template.*chat_template="):
            llm.chat(HELLO, GREEDY)
        assert llm.chat(HELLO, GREEDY, chat_template=TOOL_TEMPLATE)[0].token_ids
        assert llm.generate("hi", GREEDY)[0].token_ids
    (model / "chat_template.jinja").write_text("side: {{ messages[0].content }}")
    with Engine(model) as llm:
        assert llm.chat(HELLO, GREEDY)[0].prompt == "side: hi"


def test_an_awaited_chat_is_another(llm: Engine, tiny_model: Path) -> None:
    options: dict[str, Any] = {"chat_template": TOOL_TEMPLATE, "tools": TOOLS}

    async def ask() -> tuple[str, str]:
        async with AsyncEngine(tiny_model) as engine:
            whole = (await engine.chat(HELLO, GREEDY, **options))[0].text
            return whole, "".join([i.text async for i in engine.stream(HELLO, GREEDY, **options)])

    text = llm.chat(HELLO, GREEDY, **options)[0].text
    assert asyncio.run(ask()) == (text, text)
