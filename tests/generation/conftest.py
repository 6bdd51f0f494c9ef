from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrt import Engine


@pytest.fixture(scope="package")
def llm(tiny_model: Path) -> Iterator[Engine]:
    """One engine for all tests that change nothing about it."""
    with Engine(tiny_model, max_num_batched_tokens=64, max_num_seqs=16) as engine:
        yield engine
