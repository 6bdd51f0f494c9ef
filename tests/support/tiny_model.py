"""Fixtures: tiny random models that open in a second, written once per test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITER = "tests.support.write_tiny_model"


def write_tiny_model(directory: Path, *, seed: int, num_heads: int) -> Path:
    """Write a tiny model in a process of its own and return its directory."""
    subprocess.run(
        [sys.executable, "-m", WRITER, str(directory), str(seed), str(num_heads)],
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
