from __future__ import annotations

import pytest

from tests.support.checkpoints import FAMILIES, Checkpoint, write_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """One tiny checkpoint of every family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        family: write_checkpoint(folder / family, model_type, **changes)
        for family, (model_type, changes) in FAMILIES.items()
    }
