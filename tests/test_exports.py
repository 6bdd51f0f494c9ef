"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import llmrt

HEAVY = ("torch", "numpy", "ray", "jinja2", "tokenizers", "huggingface_hub", "gguf", "cloudpickle")
UNUSED = ("asyncio", "llmrt.async_stream", "llmrt.runtime.launchers.ray")
"""What an engine needs only where it is asked for."""


def test_all_is_sorted_and_every_name_can_be_imported() -> None:
    assert sorted(llmrt.__all__, key=lambda name: (name == "__version__", name)) == llmrt.__all__
    for name in llmrt.__all__:
        assert not isinstance(getattr(llmrt, name), ModuleType), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(llmrt, "Enigne")


def test_constructing_an_engine_imports_nothing_heavy() -> None:
    code = "from llmrt import AsyncEngine, Engine, SamplingParams; Engine('m', tp=2)"
    assert imported_by(code, HEAVY) == "[]"


def test_constructing_an_engine_imports_nothing_that_it_may_never_use() -> None:
    code = "from llmrt import Engine, SamplingParams; Engine('m', tp=2)"
    assert imported_by(code, UNUSED) == "[]"


def imported_by(code: str, modules: tuple[str, ...]) -> str:
    """Return which of *modules* a fresh interpreter has after *code*, as it prints the list."""
    code = f"import sys; {code}; print([m for m in {modules!r} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    return out.stdout.strip()
