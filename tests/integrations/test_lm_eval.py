"""lm-evaluation-harness on llmrt against the harness on transformers, both in their own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TASKS: dict[str, Any] = {
    "choices": [
        {"question": "The capital of France is", "choices": [" Paris", " London"], "answer": 0},
        {"question": "Two plus two is ", "choices": ["five", "four", " three"], "answer": 1},
        {"question": "é", "choices": ["\N{GRINNING FACE}", "b"], "answer": 0},
        {"question": "long " * 120, "choices": [" text", " word"], "answer": 0},
    ],
    "texts": ["The sky is blue.", "Once upon a time there was a king. " * 30],
    "prompts": [["The capital of France is", "Paris"], ["1 2 3 4\n\n", "5"], ["long " * 120, "x"]],
}


def run(program: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
    )


def evaluate(model: Path, backend: str, tasks: Path) -> dict[str, Any]:
    done = run(["-m", "tests.support.evaluate", str(model), backend, str(tasks), "511"])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_evaluation_differs_from_transformers(tiny_model: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps(TASKS))
    ours, theirs = (evaluate(tiny_model, name, tasks) for name in ("llmrt", "transformers"))
    for task, metrics in theirs["results"].items():
        assert ours["results"][task] == pytest.approx(metrics, rel=1e-4), task
    assert ours["answers"]["prompts"] == theirs["answers"]["prompts"]
    for task in ("choices", "texts"):
        assert _numbers(ours["answers"][task]) == pytest.approx(
            _numbers(theirs["answers"][task]), abs=0.01
        )


def _numbers(nested: Any) -> list[float]:
    if isinstance(nested, list):
        return [number for item in nested for number in _numbers(item)]
    return [float(nested)]


REFUSED = """
from types import SimpleNamespace
from llmrt.errors import ConfigError
from llmrt.integrations.lm_eval import LlmrtLM
request = SimpleNamespace(args=("a", {"until": [], "num_beams": 4}))
engine = SimpleNamespace()
try:
    LlmrtLM(engine).generate_until([request])
except ConfigError as error:
    print(error)
"""


def test_an_option_of_a_task_is_passed_over() -> None:
    done = run(["-c", REFUSED])
    assert "num_beams" in done.stdout, done.stderr


WITHOUT_LIBRARY = """
import sys
sys.modules["lm_eval"] = None
try:
    import llmrt.integrations.lm_eval
except ImportError as error:
    print(error)
"""


def test_a_missing_library_is_not_named() -> None:
    done = run(["-c", WITHOUT_LIBRARY])
    assert "pip install 'llmrt[eval]'" in done.stdout, done.stderr
