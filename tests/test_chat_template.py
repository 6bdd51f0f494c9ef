from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from llmrt.chat_template import ChatTemplate, load_templates
from llmrt.errors import RequestError

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "hello"}


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    arguments: dict[str, Any] = {
        "add_generation_prompt": False,
        "continue_final_message": False,
        "tools": None,
        "variables": {},
    }
    return ChatTemplate(source).render(messages or [USER], **(arguments | options))


# ---- as transformers runs them ----


def test_a_conversation_is_rendered_with_and_without_an_open_turn() -> None:
    assert render(CHATML) == "<|user|>hello<|end|>\n"
    assert render(CHATML, add_generation_prompt=True).endswith("<|end|>\n<|assistant|>")


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_variables_and_tools_reach_the_template() -> None:
    source = "{{ bos_token }}{{ tools | tojson }}{{ enable_thinking }}"
    tools = [{"name": "f<x>", "é": 1}]
    found = render(source, tools=tools, variables={"bos_token": "<s>", "enable_thinking": False})
    assert found == '<s>[{"name": "f<x>", "é": 1}]False'


def test_json_can_be_indented() -> None:
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_templates_may_use_what_transformers_offers_them() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}{% set x = 1 %}said{% endgeneration %}"
        "{{ strftime_now('%Y') }}"
    )
    assert render(source) == f"01said{datetime.datetime.now():%Y}"


def test_a_refusal_of_the_template_is_a_request_error_with_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_does_not_compile_says_so() -> None:
    with pytest.raises(RequestError, match="does not compile"):
        render("{% if %}")


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"],
)
def test_a_template_can_neither_leave_the_sandbox_nor_change_the_messages(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_a_key_that_is_none_reads_as_absent() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": None}
    assert render("{{ messages[0].tool_calls is defined }}", message) == "False"


# ---- content in parts ----


def test_text_parts_become_one_string_where_the_template_wants_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert render(CHATML, message) == "<|user|>one\ntwo<|end|>\n"
    assert render(PARTS, message) == "[one][two]"


def test_other_parts_are_refused_by_type() -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    with pytest.raises(RequestError, match=r"'image_url'.*text only"):
        render(CHATML, message)


# ---- continuing a message ----


@pytest.mark.parametrize("content", ["The answer ", [{"type": "text", "text": "The answer "}]])
def test_the_final_message_stays_open(content: Any) -> None:
    found = render(
        CHATML, USER, {"role": "assistant", "content": content}, continue_final_message=True
    )
    assert found == "<|user|>hello<|end|>\n<|assistant|>The answer "


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="cannot be continued"):
        render("{{ messages[0].role }}", USER, continue_final_message=True)


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    render(PARTS, *messages, continue_final_message=True)
    assert json.dumps(messages) == before


# ---- what is no conversation ----


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, [{"content": "x"}], ["x"], 5])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(CHATML).render(
            messages,
            add_generation_prompt=False,
            continue_final_message=False,
            tools=None,
            variables={},
        )


# ---- where templates are kept ----


def test_the_configured_template_is_the_default(tmp_path: Path) -> None:
    assert load_templates(tmp_path, "x") == {"default": "x"}
    assert load_templates(tmp_path, [{"name": "a", "template": "x"}]) == {"a": "x"}
    assert load_templates(tmp_path, None) == {}


def test_side_files_come_before_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert load_templates(tmp_path, "config") == {"default": "json"}
    (tmp_path / "chat_template.jinja").write_text("jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_templates(tmp_path, "config") == {"default": "jinja", "tool_use": "tools"}
