from __future__ import annotations

import pytest
import torch

from tests.support.checkpoints import FAMILIES, Checkpoint, write_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """One tiny checkpoint of every family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        family: write_checkpoint(folder / family, model_type, **changes)
        for family, (model_type, changes) in FAMILIES.items()
    }


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from more, and a pool that starts in a test would count as left."""
    torch.set_num_threads(2)
    torch.ones(1 << 20).sin()  # starts the pool's one thread, which then stays
    torch.set_num_threads(1)
