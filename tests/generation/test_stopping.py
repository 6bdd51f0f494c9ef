"""Where a completion ends, and what of its text is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrt import CompletionOutput, Engine, SamplingParams
from tests.support.scripts import EOS, copy_model, saying

LETTERS = "ABCDEFG"


def ids(llm: Engine, text: str) -> list[int]:
    return llm.tokenizer.encode(text, add_special_tokens=False)


def say(llm: Engine, text: str, **params: Any) -> CompletionOutput:
    """Let the model say *text* and check that the stream says the same."""
    asked = saying(ids(llm, text), **params)
    whole = llm.generate("x", asked)[0].outputs[0]
    increments = list(llm.stream("x", asked))
    assert "".join(i.text for i in increments) == whole.text
    assert tuple(t for i in increments for t in i.token_ids) == whole.token_ids
    assert increments[-1].finish_reason == whole.finish_reason
    assert increments[-1].stop_reason == whole.stop_reason
    return whole


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DEF", "ABC"),
        (["XY", "DEF", "FG"], "ABC"),
        ("G", "ABCDEF"),
        ("A", ""),
        (["EF", "DEF"], "ABC"),
    ],
)
def test_a_part_of_a_stop_string_is_shown(llm: Engine, stop: Any, text: str) -> None:
    whole = say(llm, LETTERS, stop=stop)
    assert (whole.text, whole.finish_reason) == (text, "stop")
    assert whole.stop_reason in ([stop] if isinstance(stop, str) else stop)


def test_the_stop_string_is_missing_where_it_was_asked_for(llm: Engine) -> None:
    assert say(llm, LETTERS, stop="DEF", include_stop_str_in_output=True).text == "ABCDEF"


def test_text_that_only_began_like_a_stop_string_is_lost_at_the_end(llm: Engine) -> None:
    whole = say(llm, "ABCDE", stop="DEF")
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ABCDE", "length", None)


def test_a_stop_string_that_ends_with_the_last_token_is_overlooked(llm: Engine) -> None:
    whole = say(llm, "ABCDEF", stop="DEF")
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("ABC", "stop", "DEF")


def test_no_stop_strings_stop_something(llm: Engine) -> None:
    assert say(llm, LETTERS, stop=[]).text == LETTERS
    with pytest.raises(ValueError, match="not empty"):
        SamplingParams(stop=[""])


@pytest.mark.parametrize(("included", "text"), [(False, "ABC"), (True, "ABCD")])
def test_a_stop_id_is_a_part_of_the_text_unasked(llm: Engine, included: bool, text: str) -> None:
    (stop_id,) = ids(llm, "D")
    whole = say(llm, LETTERS, stop_token_ids=[stop_id], include_stop_str_in_output=included)
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (text, "stop", stop_id)
    assert whole.token_ids[-1] == stop_id


def test_eos_is_shown_or_has_a_reason(llm: Engine) -> None:
    asked = saying([*ids(llm, "AB"), EOS, *ids(llm, "C")], skip_special_tokens=False)
    whole = llm.generate("x", asked)[0].outputs[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("AB", "stop", None)


def test_eos_ends_a_request_that_ignores_it(llm: Engine) -> None:
    asked = saying([*ids(llm, "AB"), EOS, *ids(llm, "C")], ignore_eos=True)
    whole = llm.generate("x", asked)[0].outputs[0]
    assert (whole.text, whole.finish_reason) == ("ABC", "length")


@pytest.mark.parametrize("end", [EOS, 40, 41])
def test_only_one_of_several_eos_ids_ends_a_completion(
    tiny_model: Path, tmp_path: Path, end: int
) -> None:
    model = copy_model(tiny_model, tmp_path / "m", generation_config={"eos_token_id": [40, 41]})
    with Engine(model) as llm:
        whole = llm.generate("x", saying([50, end, 51, 52]))[0].outputs[0]
    assert (whole.token_ids, whole.finish_reason) == ((50, end), "stop")


def wishing(token_id: int, **params: Any) -> SamplingParams:
    """Return parameters under which the model says one id unless it may not."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "min_tokens": 3, **params}
    return SamplingParams(logit_bias={token_id: 1e4}, **options)


def test_eos_comes_before_the_least_tokens(llm: Engine) -> None:
    whole = llm.generate("x", wishing(EOS))[0].outputs[0]
    assert (len(whole.token_ids), whole.finish_reason) == (4, "stop")
    assert EOS not in whole.token_ids[:3]


def test_a_stop_id_comes_before_the_least_tokens(llm: Engine) -> None:
    whole = llm.generate("x", wishing(99, stop_token_ids=[99], ignore_eos=True))[0].outputs[0]
    assert (len(whole.token_ids), whole.stop_reason) == (4, 99)
    assert 99 not in whole.token_ids[:3]


def test_a_stop_string_ends_a_text_before_the_least_tokens(llm: Engine) -> None:
    assert say(llm, "AAAAAA", stop="A", min_tokens=3).text == "AA"
    whole = say(llm, "AAAAAA", stop="A", min_tokens=3)
    assert (len(whole.token_ids), whole.finish_reason) == (3, "stop")


def test_without_text_ids_are_lost_or_text_is_made(llm: Engine) -> None:
    whole = say(llm, LETTERS, detokenize=False, logprobs=1)
    assert (whole.text, list(whole.token_ids)) == ("", ids(llm, LETTERS))
    assert whole.logprobs is not None
    assert {e.decoded_token for entry in whole.logprobs for e in entry.values()} == {None}


def test_a_stop_in_one_completion_ends_its_siblings(llm: Engine) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=40, stop=["a", "e", "0"])
    output = llm.generate("x", params)[0]
    ends = [(len(o.token_ids), o.finish_reason) for o in output.outputs]
    assert len(set(ends)) > 1
    for completion in output.outputs:
        assert completion.finish_reason is not None
        assert not any(stop in completion.text for stop in ("a", "e", "0"))


# ---- characters over token borders ----

MIXED = "\N{GRINNING FACE}é你a    b\N{WAVING HAND SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-3}"


def test_a_streamed_character_is_cut(llm: Engine) -> None:
    whole = say(llm, MIXED)  # a byte-level model: up to eight tokens a character
    assert whole.text == MIXED
    assert not [i for i in llm.stream("x", saying(ids(llm, MIXED))) if "\ufffd" in i.text]


def test_a_text_that_ends_inside_a_character_ends_early(llm: Engine) -> None:
    cut = ids(llm, "a\N{GRINNING FACE}")[:-1]
    whole = llm.generate("x", saying(cut))[0].outputs[0]
    assert whole.text == llm.tokenizer.decode(cut) == "a\ufffd"


def test_a_space_that_begins_a_completion_is_lost(llm: Engine) -> None:
    assert say(llm, "  leading x").text == "  leading x"
