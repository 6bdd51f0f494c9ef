from __future__ import annotations

from pathlib import Path

import pytest

from llmrt import Engine, SamplingParams
from tests.hosts.workplace import Workplace


@pytest.fixture(scope="session")
def tokens(tiny_model: Path) -> list[int]:
    """What every host must get for an answer."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with Engine(tiny_model) as llm:
        return list(llm.generate("a", params)[0].token_ids)


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Path, tokens: list[int]) -> Workplace:
    return Workplace(tmp_path, tiny_model, tokens)
