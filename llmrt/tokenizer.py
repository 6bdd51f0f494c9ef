"""Tokenizer: text to token ids and back, and the chat template of a model. Text stops here.

Prompts are encoded one by one: the library's batch calls start a thread pool that stays for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrt.chat_template import ChatTemplate, load_templates
from llmrt.checkpoint.checkpoint import Checkpoint, read_json_object
from llmrt.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import tokenizers

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class Tokenizer:
    """The tokenizer of one model.

    Its beginning-of-sequence token (BOS) comes once, whoever writes it: `encode(text)` puts it
    first where the model wants one, unless the text begins with it already; a chat is encoded
    without, because templates write their own.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str = "",
        settings: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        settings = settings or {}
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        """The tokenizers.Tokenizer itself."""
        self.special_tokens = {
            role: text for role in _ROLES if (text := _token_text(settings.get(role))) is not None
        }
        """By role, as `bos_token`."""
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        """Ids that `skip_special_tokens` leaves out of the text."""
        self.byte_ids = frozenset(
            token_id
            for byte in range(256)
            if (token_id := backend.token_to_id(f"<0x{byte:02X}>")) is not None
        )
        """Ids that stand for one byte each, where the vocabulary spells rare characters so."""
        self.name = name
        """What its model is called."""
        first_id = backend.encode("", add_special_tokens=True).ids[:1]
        self._encoder_adds_bos = first_id == [self.bos_token_id]
        self._wants_bos = bool(settings.get("add_bos_token", self._encoder_adds_bos))
        self._templates = dict(templates or {})
        self._compiled: dict[str, ChatTemplate] = {}
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Load the tokenizer of a model.

        Raises:
            ConfigError: it has no tokenizer.json, or the file cannot be read.
        """
        path = checkpoint.directory / "tokenizer.json"
        settings = _read_settings(checkpoint.directory)
        templates = load_templates(checkpoint.directory, settings.get("chat_template"))
        return cls(_load(path), name=checkpoint.name, settings=settings, templates=templates)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. The model's matrix may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token; the model's generation_config may name more."""
        return self._special_id("eos_token")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The same as a tuple, empty where the tokenizer names none."""
        return () if self.eos_token_id is None else (self.eos_token_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of *text*, special tokens written in it included.

        Args:
            text: A prompt.
            add_special_tokens: Put BOS first (and whatever else the tokenizer adds), where the
                text does not begin with it. False for a rendered chat.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        bos_id = self.bos_token_id
        if not add_special_tokens or bos_id is None:
            return ids
        wanted = self._wants_bos and not text.startswith(self.special_tokens["bos_token"])
        if self._encoder_adds_bos and not wanted:
            return ids[1:]
        return [bos_id, *ids] if wanted and not self._encoder_adds_bos else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of *ids*, all at once."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; U+FFFD where it is a part of a character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.backend.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text

    # ---- chat ----

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(self._templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation as a prompt. Encode it without special tokens.

        Args:
            messages: Mappings with `role` and `content`; content is a string, or a list of text
                parts.
            add_generation_prompt: Whether to open the assistant's turn; None does, unless the
                final message is continued.
            continue_final_message: Leave the final message open, for the model to go on with it.
            tools: JSON schemas of the functions that the model may call.
            chat_template: A Jinja template, or the name of one of the model's.
            kwargs: Further variables for the template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt opens a new message, continue_final_message keeps the last "
                "one open: ask for one of them."
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        template = self._template(chat_template, has_tools=bool(tools))
        variables = {**self.special_tokens, **kwargs}
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )

    def _template(self, chosen: str | None, *, has_tools: bool) -> ChatTemplate:
        source = self._template_source(chosen, has_tools=has_tools)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source]

    def _template_source(self, chosen: str | None, *, has_tools: bool) -> str:
        if chosen is not None:
            return self._templates.get(chosen, chosen)
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise RequestError(
                f"{self.name} has no default chat template; choose one with chat_template=: "
                f"{', '.join(sorted(self._templates))}."
            )
        raise RequestError(
            f"{self.name or 'This model'} has no chat template. Pass one (Jinja) as "
            "chat_template=, put a chat_template.jinja beside its tokenizer.json, or use "
            "generate() with a prompt you wrote."
        )

    def _special_id(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.backend.token_to_id(text)


def _load(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise ConfigError(
            f"{path.parent} has no tokenizer.json, so text cannot be encoded. Save one there with "
            "transformers (`AutoTokenizer.from_pretrained(...).save_pretrained(...)`), or give "
            "token ids and detokenize=False."
        )
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} cannot be read ({error}). Fetch this file again.") from error


def _read_settings(directory: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.is_file():
            settings.update(read_json_object(path))
    return settings


def _token_text(entry: object) -> str | None:
    """Return the text of a special token: it is stored as a string, or under `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return entry if isinstance(entry, str) else None
