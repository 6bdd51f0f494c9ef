from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmrt.errors import ConfigError, RequestError
from llmrt.tokenizer import Tokenizer
from tests.support.tokenizers import (
    byte_level_backend,
    llama_backend,
    tokenizer_of,
    with_bos,
    write_tokenizer,
)

HELLO = [{"role": "user", "content": "hello"}]


# ---- BOS, once ----


def test_a_text_gets_the_bos_of_its_tokenizer() -> None:
    tokenizer = tokenizer_of(with_bos(llama_backend()))
    ids = tokenizer.encode("the")
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(ids[0]) == 1


@pytest.mark.parametrize("written", ["<s>the", "<s> the", "<s><s>the"])
def test_a_text_that_begins_with_bos_gets_no_other(written: str) -> None:
    tokenizer = tokenizer_of(with_bos(byte_level_backend()))
    assert tokenizer.encode(written) == tokenizer.encode(written, add_special_tokens=False)
    assert tokenizer.encode(written).count(tokenizer.bos_token_id or 0) == written.count("<s>")


def test_a_rendered_chat_has_the_bos_of_its_template_only() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = tokenizer_of(with_bos(byte_level_backend()), chat_template=template)
    rendered = tokenizer.apply_chat_template(HELLO)
    assert tokenizer.encode(rendered, add_special_tokens=False)[:2] == [1, tokenizer.encode("h")[1]]
    assert tokenizer.encode(rendered).count(1) == 1


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("post_processed", [True, False])
def test_the_flag_in_tokenizer_config_decides(flag: bool, post_processed: bool) -> None:
    backend = byte_level_backend()
    tokenizer = tokenizer_of(with_bos(backend) if post_processed else backend, add_bos_token=flag)
    assert (tokenizer.encode("the")[0] == tokenizer.bos_token_id) == flag


def test_a_tokenizer_without_bos_gives_an_empty_text_no_tokens() -> None:
    assert tokenizer_of(byte_level_backend()).encode("") == []


# ---- loading ----


def test_a_tokenizer_is_read_with_its_special_tokens_and_template(tmp_path: Path) -> None:
    settings = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    checkpoint = write_tokenizer(tmp_path, byte_level_backend(), settings)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.apply_chat_template(HELLO) == "<s>hello</s>"
    assert tokenizer.vocab_size == byte_level_backend().get_vocab_size()


def test_special_tokens_are_also_read_from_their_older_file(tmp_path: Path) -> None:
    checkpoint = write_tokenizer(tmp_path, byte_level_backend(), {})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert Tokenizer.from_checkpoint(checkpoint).eos_token_id == 2


def test_truncation_stored_with_a_tokenizer_does_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.from_checkpoint(write_tokenizer(tmp_path, backend, {}))
    assert tokenizer.decode(tokenizer.encode("a b c d e")) == "a b c d e"


def test_no_tokenizer_names_the_directory_and_the_way_out(tmp_path: Path) -> None:
    checkpoint = write_tokenizer(tmp_path, byte_level_backend(), {})
    (tmp_path / "tokenizer.json").unlink()
    assert not checkpoint.has_tokenizer
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_checkpoint(checkpoint)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    checkpoint = write_tokenizer(tmp_path, byte_level_backend(), {})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_checkpoint(checkpoint)


def test_special_tokens_are_left_out_of_the_text_unless_asked_for() -> None:
    tokenizer = tokenizer_of(byte_level_backend())
    ids = tokenizer.encode("the</s>")
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the</s>"
    assert tokenizer.token_text(ids[-1]) == "</s>"


PROBE = """
import os, sys, warnings
warnings.simplefilter("error")
from pathlib import Path
from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.tokenizer import Tokenizer
def num_threads():
    return len(os.listdir("/proc/self/task"))
before, environ = num_threads(), dict(os.environ)
directory = Path(sys.argv[1])
tokenizer = Tokenizer.from_checkpoint(
    Checkpoint(name="tiny", directory=directory, weights="", config={}))
for _ in range(50):
    assert tokenizer.decode(tokenizer.encode("the theatre " * 500)) == "the theatre " * 500
assert num_threads() == before, "threads were started"
assert dict(os.environ) == environ
pid = os.fork()
if pid == 0:
    tokenizer.encode("the")
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
heavy = {"torch", "numpy", "gguf", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


def test_encoding_starts_no_threads_and_a_fork_may_follow(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level_backend(), {})
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- which template ----


def test_no_template_says_how_to_pass_one() -> None:
    tokenizer = tokenizer_of(byte_level_backend())
    assert not tokenizer.has_chat_template
    with pytest.raises(
        RequestError, match=r"no chat template.*chat_template=.*chat_template\.jinja"
    ):
        tokenizer.apply_chat_template(HELLO)
    assert tokenizer.encode("still works")
    assert tokenizer.apply_chat_template(HELLO, chat_template="[{{ messages[0].content }}]") == (
        "[hello]"
    )


def test_templates_are_chosen_by_name_and_for_tools() -> None:
    templates = {"default": "plain", "tool_use": "tools", "rag": "documents"}
    tokenizer = tokenizer_of(byte_level_backend(), chat_template=templates)
    assert tokenizer.apply_chat_template(HELLO) == "plain"
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "tools"
    assert tokenizer.apply_chat_template(HELLO, chat_template="rag") == "documents"


def test_without_a_default_template_the_names_are_offered() -> None:
    tokenizer = tokenizer_of(byte_level_backend(), chat_template={"rag": "documents"})
    with pytest.raises(RequestError, match=r"no default chat template.*rag"):
        tokenizer.apply_chat_template(HELLO)


def test_a_message_cannot_be_continued_and_followed_by_another() -> None:
    tokenizer = tokenizer_of(byte_level_backend(), chat_template="x")
    with pytest.raises(RequestError, match="ask for one"):
        tokenizer.apply_chat_template(
            HELLO, add_generation_prompt=True, continue_final_message=True
        )
