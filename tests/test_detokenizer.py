from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrt.detokenizer import UNKNOWN, IncrementalDetokenizer
from llmrt.sampling import SamplingParams
from llmrt.tokenizer import Tokenizer
from tests.support.tokenizers import BACKENDS, tokenizer_of

TOKENIZERS = {name: tokenizer_of(backend()) for name, backend in BACKENDS.items()}
KEEP = SamplingParams(skip_special_tokens=False)
SKIP = SamplingParams(skip_special_tokens=True)
TEXTS = [
    "a    b",
    " leading x",
    "the theatre",
    "  ",
    "\n\n1.  the",
    "😀 the 👩‍👩‍👧 end",
    "你好 the 世界",
    "éé naïve é",
    "<tool> </s> x",
    "a\ufffdb",
    "",
]

every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def pieces_of(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, prompt: list[int] | None = None
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, params, prompt or [])
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.finish()]


@every_tokenizer
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_text_are_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, ids, KEEP)) == tokenizer.decode(ids, False)


@every_tokenizer
@pytest.mark.parametrize("text", ["x😀x", "你好x", "éx", "a😀你é👩‍👩‍👧."])
def test_no_part_of_a_character_is_shown(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert not any(UNKNOWN in piece for piece in pieces_of(tokenizer, ids, KEEP))


@settings(max_examples=400, deadline=None)
@given(name=st.sampled_from(sorted(TOKENIZERS)), data=st.data(), skip=st.booleans())
def test_any_ids_come_out_as_the_full_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    some_id = st.integers(0, tokenizer.vocab_size - 1)
    byte_id = st.sampled_from(tokenizer.encode("😀你é"))
    ids = data.draw(st.lists(st.one_of(some_id, byte_id), max_size=60))
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "the a", " x", "</s>"])))
    params = SKIP if skip else KEEP

    text = "".join(pieces_of(tokenizer, ids, params, prompt))

    whole = tokenizer.decode([*prompt, *ids], skip)
    assert text == whole[len(tokenizer.decode(prompt, skip)) :]


def test_a_completion_keeps_the_space_that_begins_it() -> None:
    tokenizer = TOKENIZERS["llama"]
    ids = [tokenizer.backend.token_to_id(SPACE_THE := "\u2581the")]
    assert SPACE_THE
    assert "".join(pieces_of(tokenizer, ids, SKIP, tokenizer.encode("a"))) == " the"
    assert "".join(pieces_of(tokenizer, ids, SKIP, tokenizer.encode("</s>"))) == "the"


def test_a_prompt_that_ends_inside_a_character_gets_the_whole_of_it() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("x😀")
    assert "".join(pieces_of(tokenizer, ids[-1:], SKIP, ids[:-1])) == "😀"


@every_tokenizer
def test_the_cost_of_a_token_does_not_grow_with_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    longest = 0

    class Watched(IncrementalDetokenizer):
        def _decode(self, ids: list[int]) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            nonlocal longest
            longest = max(longest, len(ids))
            return super()._decode(ids)

    garbage = [tokenizer.backend.token_to_id("ð")] * 500 if name == "byte-level" else []
    detokenizer = Watched(tokenizer, KEEP)
    for token_id in [*tokenizer.encode("the 😀 é world. " * 100), *garbage]:
        detokenizer.append(token_id)
    assert longest < 50


def test_without_detokenizing_nothing_is_decoded() -> None:
    params = SamplingParams(detokenize=False)
    assert pieces_of(TOKENIZERS["llama"], [5, 6, 7], params) == ["", "", "", ""]
