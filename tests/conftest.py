from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.support.kernel import jupyter_loop
from tests.support.leaks import no_leaks
from tests.support.tiny_model import other_tiny_model, tiny_model

__all__ = ["jupyter_loop", "other_tiny_model", "tiny_model"]


def pytest_collection_finish() -> None:
    """Let the collections of each test pass over what was imported: half a second with torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """End every test with nothing left that it did not find."""
    with no_leaks():
        yield
