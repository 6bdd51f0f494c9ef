"""Chat templates: from a list of messages to one prompt, with Jinja as transformers runs it.

Templates come with models, so they are foreign code: they run in Jinja's sandbox, on copies of the
messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from llmrt.checkpoint.checkpoint import read_json_object
from llmrt.errors import ConfigError, RequestError

_OPEN_END = "\N{INVISIBLE SEPARATOR}llmrt-open-end\N{INVISIBLE SEPARATOR}"
"""Marks the end of a message that is to be continued, to be found in the rendered text."""

_LOOPS_OVER_CONTENT = re.compile(r"\bfor\s+\w+\s+in\s+[^%]*content\b")


def load_templates(directory: Path, configured: object) -> dict[str, str]:
    """Return the chat templates of a model by name; the usual one is `default`.

    Args:
        directory: Where chat_template.jinja, chat_template.json and additional_chat_templates/
            are looked for; they come before what is configured.
        configured: `chat_template` of tokenizer_config.json: a string, or a list of named ones.
    """
    templates = _configured_templates(configured)
    legacy = directory / "chat_template.json"
    if legacy.is_file():
        templates |= _configured_templates(read_json_object(legacy).get("chat_template"))
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = _read_text(directory / "chat_template.jinja")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _configured_templates(configured: object) -> dict[str, str]:
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, list):
        entries: list[Mapping[str, str]] = configured  # pyright: ignore[reportUnknownVariableType]
        return {entry["name"]: entry["template"] for entry in entries}
    return {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Fetch this file again.") from error


class ChatTemplate:
    """One template. Compiled when first rendered, and kept."""

    def __init__(self, source: str) -> None:
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the prompt.

        Raises:
            RequestError: the template does not compile, or refuses the messages.
        """
        own = [self._own_message(message) for message in _checked(messages)]
        if continue_final_message:
            _mark_end(own)
        template = self._compiled
        try:
            text: str = template.render(
                messages=own,
                tools=tools,
                documents=variables.get("documents"),
                add_generation_prompt=add_generation_prompt,
                **{name: value for name, value in variables.items() if name != "documents"},
            )
        except Exception as error:  # a template can fail in every way a program can
            raise RequestError(
                f"The chat template refuses these messages: {type(error).__name__}: {error}"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def _compiled(self) -> Any:
        try:
            return _environment().from_string(self.source)
        except Exception as error:
            raise RequestError(
                f"The chat template does not compile: {error}. It begins {self.source[:40]!r}; "
                "chat_template= takes a Jinja template or the name of one of the model's."
            ) from error

    def _own_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # A key that is None, as in OpenAI's answers, is an absent one: templates would print it.
        own = {name: value for name, value in message.items() if value is not None}
        content = own.get("content")
        if isinstance(content, (list, tuple)):
            parts: list[Mapping[str, Any]] = [_text_part(part) for part in content]  # pyright: ignore[reportUnknownVariableType]
            keeps_parts = _LOOPS_OVER_CONTENT.search(self.source)
            own["content"] = parts if keeps_parts else "\n".join(part["text"] for part in parts)
        return own


def _checked(messages: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            "A conversation is a list of messages such as {'role': 'user', 'content': 'Hello'}, "
            f"not {messages!r}."
        )
    for message in messages:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):  # pyright: ignore[reportUnknownMemberType]
            raise RequestError(f"A message must be a mapping with a 'role', not {message!r}.")
    return messages  # pyright: ignore[reportUnknownVariableType]


def _text_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):  # pyright: ignore[reportUnknownMemberType]
        return {"type": "text", "text": part["text"]}
    kind = part.get("type") if isinstance(part, Mapping) else part  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    raise RequestError(f"A content part of type {kind!r} cannot be used: llmrt takes text only.")


# ---- continuing the final message ----


def _mark_end(messages: list[dict[str, Any]]) -> None:
    final = messages[-1]
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _OPEN_END
    elif isinstance(content, list) and content:
        content[-1]["text"] += _OPEN_END
    else:
        raise RequestError("continue_final_message needs a final message with content.")


def _cut_at_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_OPEN_END)
    if not mark:
        raise RequestError(
            "The chat template changes or drops the final message: it cannot be continued."
        )
    return before


# ---- the Jinja environment ----


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks words for training; here it only stands for its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raiser()
    environment.globals["strftime_now"] = _now
    return environment


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raiser() -> Callable[[str], None]:
    from jinja2 import TemplateError

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    return raise_exception


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter, which escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
