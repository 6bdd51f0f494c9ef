"""The tokenizer of the default model, read out of its GGUF file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmrt.checkpoint.resolve import resolve
from llmrt.display.progress import Progress
from llmrt.sampling import SamplingParams
from llmrt.text_stream import TextStream
from llmrt.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REAL_TEXTS = [
    "The capital of France is",
    "def f(x):\n    return x + 1\n\n\n# done\t!",
    "In 1969, 2.5 million people (and 3 dogs) watched.",
    "Don't you'LL we're I'm he'd they've it's",
    "naïve café Ελληνικά Русский العربية हिन्दी 你好 世界 日本語 한국어",
    "😀👩‍👩‍👧🏳️‍🌈 ½ ² Ⅷ ٣٤",
    "a   b    c     d   1    2\n\n3.",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    '{"key": [1, 2, {"a": null}]}',
    "",
]


@pytest.fixture(scope="module")
def weights() -> Path:
    return Path(resolve(None, progress=Progress(False)).weights)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(resolve(None, progress=Progress(False)))


REFERENCE = """
import json, sys
from pathlib import Path
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
weights, (texts, messages) = Path(sys.argv[1]), json.load(sys.stdin)
reference = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
# transformers (5.24) overlooks the file's `smollm`: digits were cut first in training.
reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
)
chat = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
print(json.dumps([[reference.encode(text) for text in texts], chat]))
"""
"""A process of its own: transformers starts threads that stay."""

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def test_it_encodes_decodes_and_chats_as_transformers_reads_it(
    tokenizer: Tokenizer, weights: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(weights)],
        input=json.dumps([REAL_TEXTS, MESSAGES]),
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    ids, chat = json.loads(done.stdout)
    assert [tokenizer.encode(text) for text in REAL_TEXTS] == ids
    assert [tokenizer.decode(tokenizer.encode(text), False) for text in REAL_TEXTS] == REAL_TEXTS
    assert tokenizer.apply_chat_template(MESSAGES) == chat


def test_digits_are_cut_before_blanks_as_the_model_was_trained(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\n\n1.")
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["a", "\n\n", "1", "."]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60), skip=st.booleans())
def test_any_ids_stream_as_the_full_decode(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=skip, max_tokens=None))
    text = "".join(stream.append([token_id]).text for token_id in ids) + stream.finish()
    assert text == tokenizer.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back_without_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    # The vocabulary lacks the bytes that only the rarest planes of Unicode use.
    assume(tokenizer.decode(tokenizer.encode(text), False) == text)
    stream = TextStream(tokenizer, SamplingParams(skip_special_tokens=False, max_tokens=None))
    pieces = [stream.append([token_id]).text for token_id in tokenizer.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
