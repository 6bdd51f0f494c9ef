"""The default model, for real: fetched, opened, compared with transformers, talked to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llmrt import Engine, SamplingParams
from llmrt.checkpoint.resolve import resolve
from llmrt.display.progress import Progress
from tests.support.reference import greedy_shortfalls

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "The three laws of motion were written down by",
    "Water boils at",
    "In 1969, the first people",
    "A recipe for pancakes: take two eggs,",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "My favourite season is autumn because",
    "To be, or not to be,",
    "The largest planet of the solar system",
    "SELECT name FROM customers WHERE",
    "Dear Sir or Madam,",
    "One, two, three, four,",
    "The quick brown fox",
    "Le chat est",
    "The stock market fell today after",
    "If all roses are flowers and some flowers fade,",
    "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def weights() -> Path:
    """The GGUF file of the default model, fetched on first use."""
    return Path(resolve(None, progress=Progress("auto")).weights)


def test_float32_tokens_equal_transformers_on_every_split(weights: Path) -> None:
    outputs = []
    for tp in (1, 2, 4):
        with Engine(dtype="float32", tp=tp) as llm:
            outputs += llm.generate(PROMPTS, GREEDY)
    answers = [o.token_ids for o in outputs]
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * 3 * len(PROMPTS)
    shortfalls = greedy_shortfalls(weights, [o.prompt_token_ids for o in outputs], answers)
    assert max(map(max, shortfalls)) < 1e-3  # At a near-tie either token will do.


SCRIPT = """
from llmrt import Engine
with Engine(tp=4, backend="mp") as llm:
    print(llm.generate("The capital of France is")[0].text)
print("done")
"""


@pytest.mark.parametrize("way", ["file", "-c", "stdin"])
def test_the_unguarded_script_runs_once(way: str, tmp_path: Path, weights: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = {"file": [str(script)], "-c": ["-c", SCRIPT], "stdin": ["-"]}[way]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=SCRIPT if way == "stdin" else None,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "done"
    assert done.stdout.count("done\n") == 1
    assert len(done.stdout) > len("done\n") + 10
    assert done.stderr == ""


def test_the_command_line_knows_the_capital_of_france(weights: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmrt", "run", "What is the capital of France?"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "Paris" in done.stdout
    assert done.stderr == ""
