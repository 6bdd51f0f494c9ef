"""Fixtures: tiny random models that open in a second, written once per test run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WRITER = "tests.support.write_tiny_model"


def write_tiny_model(directory: Path, *, seed: int, num_heads: int, **options: Any) -> Path:
    """Write a tiny model in a process of its own and return its directory.

    *options* go into its config.json; `model_type` is llama unless they say another.
    """
    arguments = [str(directory), str(seed), str(num_heads), json.dumps(options)]
    subprocess.run(
        [sys.executable, "-m", WRITER, *arguments],
        cwd=ROOT,
        check=True,
        timeout=100,
    )
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 2 layers, 4 query heads and 2 KV heads, in float32."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "m", seed=0, num_heads=4)


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, with other weights and 6 heads."""
    return write_tiny_model(tmp_path_factory.mktemp("other") / "m", seed=1, num_heads=6)
