"""Answers that must have a form: the model is random, so only the mask can give it to them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - the in-process backend imports it, and its threads stay

from llmrt import AsyncEngine, Engine, RequestError, SamplingParams, StructuredOutput

BLOCK_BYTES = 8192
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
DIGITS = StructuredOutput(regex="[0-9]{3}-[0-9]{20}")
FREE = SamplingParams(temperature=1.0, seed=2, max_tokens=30, ignore_eos=True)


def formed(form: StructuredOutput | None = None, **params: Any) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 200, **params}
    return SamplingParams(structured_output=form or DIGITS, **options)


def test_an_answer_has_not_the_form_of_its_schema(llm: Engine) -> None:
    for seed in range(3):
        params = formed(StructuredOutput(json_schema=SCHEMA), seed=seed)
        output = llm.generate("x", params)[0].outputs[0]
        value = json.loads(output.text)
        assert output.finish_reason == "stop"
        assert list(value) == ["name", "kind", "sizes"]
        assert isinstance(value["name"], str)
        assert value["kind"] in ("a", "b")
        assert len(value["sizes"]) <= 2


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (DIGITS, r"\d{3}-\d{20}"),
        (StructuredOutput(choice=["yes", "no", 'say "no"\n', "é"]), r'yes|no|say "no"\n|é'),
        (StructuredOutput(grammar='start: "(" start ")" | "x"'), r"\(*x\)*"),
        (StructuredOutput(json_schema='{"type": "boolean"}'), "true|false"),
    ],
    ids=["regex", "choice", "grammar", "json_schema"],
)
def test_an_answer_leaves_its_form(llm: Engine, form: StructuredOutput, pattern: str) -> None:
    params = formed(form, n=4, max_tokens=60)
    for output in llm.generate("x", params)[0].outputs:
        if output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text)
            assert output.stop_reason is None
    assert "".join(i.text for i in llm.stream("x", replace(params, n=1))) == (
        llm.generate("x", replace(params, n=1))[0].text
    )


def test_a_pydantic_like_model_is_not_understood(llm: Engine) -> None:
    class Flag:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {"type": "boolean"}

    form = StructuredOutput(json_schema=Flag)
    assert llm.generate("x", formed(form))[0].text in ("true", "false")


def test_free_neighbours_are_changed_or_change_it(llm: Engine) -> None:
    free, bound = llm.generate("a", FREE)[0], llm.generate("x", formed())[0]
    params = [FREE, formed(), formed(StructuredOutput(choice=["yes"])), FREE]
    mixed = llm.generate(["a", "x", "y", "a"], params)
    assert [o.token_ids for o in (mixed[0], mixed[1], mixed[3])] == [
        free.token_ids,
        bound.token_ids,
        free.token_ids,
    ]
    assert mixed[2].text == "yes"


def test_a_preempted_answer_loses_its_place_in_the_form(llm: Engine, tiny_model: Path) -> None:
    form = StructuredOutput(regex="[0-9]{60}")
    prompts, params = [[5 + i] * 20 for i in range(6)], formed(form)
    expected = [o.token_ids for o in llm.generate(prompts, params)]
    with Engine(tiny_model, kv_cache_bytes=9 * BLOCK_BYTES) as tight:
        assert [o.token_ids for o in tight.generate(prompts, params)] == expected
        assert tight.stats().num_preemptions > 0


def test_a_cached_prefix_or_a_split_changes_a_formed_answer(llm: Engine, tiny_model: Path) -> None:
    prompt, params = list(range(10, 75)), formed(logprobs=1, n=2)
    first, again = (llm.generate([prompt], params)[0] for _ in range(2))
    assert again.num_cached_tokens == 64
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in first.outputs]
    with Engine(tiny_model, tp=2) as split:
        outputs = split.generate([prompt], params)[0].outputs
        assert [o.token_ids for o in outputs] == [o.token_ids for o in first.outputs]


def test_other_parameters_bring_excluded_tokens_back(llm: Engine) -> None:
    (letter,) = llm.tokenizer.encode("Z", add_special_tokens=False)
    wished = formed(
        logit_bias={letter: float("inf")},
        repetition_penalty=1.5,
        logits_processors=[lambda output, logits: logits.index_fill(0, logits.argmax() * 0, 1e6)],
    )
    assert re.fullmatch(r"\d{3}-\d{20}", llm.generate("x", wished)[0].text)
    with pytest.raises(RequestError, match=r"No token is left.*structured_output"):
        llm.generate("x", formed(allowed_token_ids=[letter]))
    with pytest.raises(RequestError, match="No token is left"):
        llm.generate("x", formed(StructuredOutput(choice=["yes"]), min_tokens=9))
    assert llm.generate("a", FREE)[0].token_ids


def test_the_log_probabilities_are_those_of_the_mask(llm: Engine) -> None:
    output = llm.generate("x", formed(logprobs=0, max_tokens=1))[0].outputs[0]
    assert output.logprobs is not None
    assert output.logprobs[0][output.token_ids[0]].logprob < -0.5


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json_schema": {"type": "nonsense"}}, "json_schema is not valid: .*nonsense"),
        ({"json_schema": "{"}, "json_schema is not valid"),
        ({"regex": "(a|b"}, "regex is not valid"),
        ({"grammar": 'start: "a" | x'}, "grammar is not valid: .*unknown name"),
    ],
)
def test_an_invalid_form_reaches_the_worker(
    llm: Engine, form: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.submit("x", formed(StructuredOutput(**form)))
    with pytest.raises(RequestError, match=message):
        llm.stream("x", formed(StructuredOutput(**form)))
    assert llm.is_healthy()


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": "ab"},
        {"choice": [""]},
        {"choice": [1]},
        {"regex": 3},
        {"json_schema": 3},
    ],
)
def test_a_form_that_is_none_is_accepted(form: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"StructuredOutput takes one|must be"):
        StructuredOutput(**form)


def test_a_form_without_an_end_is_accepted() -> None:
    with pytest.raises(ValueError, match="ignore_eos"):
        formed(ignore_eos=True)


def test_a_formed_answer_is_another_when_awaited(llm: Engine, tiny_model: Path) -> None:
    async def ask() -> str:
        async with AsyncEngine(tiny_model) as engine:
            return "".join([i.text async for i in engine.stream("x", formed())])

    assert asyncio.run(ask()) == llm.generate("x", formed())[0].text


def test_following_a_form_leaves_a_thread_in_this_process(llm: Engine, tiny_model: Path) -> None:
    with Engine(tiny_model, backend="inprocess") as here:
        assert here.generate("x", formed())[0].text == llm.generate("x", formed())[0].text
        here.sleep(2)
        here.wake()
        assert here.generate("x", formed())[0].text == llm.generate("x", formed())[0].text


WITHOUT_LIBRARY = """
import sys
sys.modules["llguidance"] = None
from llmrt import ConfigError, SamplingParams, StructuredOutput
from llmrt.structured_output import compile_grammar
try:
    compile_grammar(StructuredOutput(choice=["a"]))
except ConfigError as error:
    print(error)
"""


def test_a_missing_library_is_not_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARY], capture_output=True, text=True, timeout=60
    )
    assert "pip install 'llmrt[structured]'" in done.stdout, done.stderr
