from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmrt.checkpoint.gguf_file import open_gguf
from llmrt.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_config_from_gguf
from llmrt.display.progress import Progress
from llmrt.tokenizer import Tokenizer
from tests.support.gguf_models import write_gguf_model
from tests.support.tokenizers import byte_level_backend, llama_backend, tokenizer_of, with_bos

QUIET = Progress(False)
REFERENCES = {
    "gpt2": tokenizer_of(byte_level_backend()),
    "llama": tokenizer_of(with_bos(llama_backend())),
}
TEXTS = st.text("the ab<>xé😀你\n1\u2581", max_size=20) | st.lists(
    st.sampled_from(["<s>", "</s>", "<tool>", " the", "the", "  ", "é", "😀", "1234", "\n\n"])
).map("".join)


def tokenizer_in(path: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(open_gguf(path, name="tiny", progress=QUIET))


@pytest.fixture(params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer out of a GGUF file, and the one that went in."""
    path = write_gguf_model(tmp_path / "model.gguf", tokenizer=request.param)
    return tokenizer_in(path), REFERENCES[request.param]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXTS)
def test_it_encodes_and_decodes_as_the_one_that_was_stored(
    pair: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    found, original = pair
    ids = found.encode(text)
    assert ids == original.encode(text)
    for skip in (True, False):
        assert found.decode(ids, skip) == original.decode(ids, skip)


def test_its_special_tokens_and_template_come_with_it(pair: tuple[Tokenizer, Tokenizer]) -> None:
    found, original = pair
    assert found.special_tokens == original.special_tokens
    assert found.special_ids == original.special_ids
    assert found.vocab_size == original.vocab_size
    assert found.apply_chat_template([{"role": "user", "content": "x"}]) == "x"


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    says = {"tokenizer.ggml.add_bos_token": True}
    path = write_gguf_model(tmp_path / "model.gguf", metadata=says)
    assert tokenizer_in(path).encode("the")[0] == 1


def test_control_tokens_of_any_spelling_stay_whole(tmp_path: Path) -> None:
    entries = vocabulary_with("<▁begin▁of▁text▁>", kind=3)
    path = write_gguf_model(tmp_path / "model.gguf", metadata=entries)
    tokenizer = tokenizer_in(path)
    ids = tokenizer.encode("a<▁begin▁of▁text▁>b")
    assert ids[1] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "ab"


def vocabulary_with(token: str, *, kind: int) -> dict[str, Any]:
    vocabulary = byte_level_backend().get_vocab()
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), token]
    types = [3, 3, 3, *[1] * (len(tokens) - 4), kind]
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 123b", ["a", "Ġ123", "b"]),
        ("smollm", "a 123b", ["a", "Ġ", "1", "2", "3", "b"]),
        ("smollm", "x  1", ["x", "ĠĠ", "1"]),
        ("llama-bpe", "a 1234b", ["a", "Ġ", "123", "4", "b"]),
        ("llama-bpe", "He'LL go", ["He", "'LL", "Ġgo"]),
        ("qwen2", "a 123b", ["a", "Ġ", "1", "2", "3", "b"]),
        ("qwen2", "x.\n\n  y", ["x", ".ĊĊ", "Ġ", "Ġy"]),
        ("tekken", "camelCase", ["camel", "Case"]),
    ],
)
def test_text_is_cut_as_the_model_was_trained(
    pre: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    path = write_gguf_model(tmp_path / "model.gguf", metadata={"tokenizer.ggml.pre": pre})
    cutter = tokenizer_in(path).backend.pre_tokenizer
    assert cutter is not None
    assert [piece for piece, _ in cutter.pre_tokenize_str(text)] == pieces


def test_every_pattern_compiles(tmp_path: Path) -> None:
    for number, pre in enumerate(PRE_TOKENIZERS):
        path = write_gguf_model(tmp_path / f"{number}.gguf", metadata={"tokenizer.ggml.pre": pre})
        assert tokenizer_in(path).decode(tokenizer_in(path).encode("Ab 12")) == "Ab 12"


def test_named_templates_are_kept_by_name() -> None:
    found = tokenizer_config_from_gguf(
        {
            "tokenizer.ggml.tokens": ["a"],
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "tools",
        }
    )
    assert found["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
