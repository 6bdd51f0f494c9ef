"""The notebooks run from top to bottom, in a kernel, and are stored without what they showed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
BY_NAME = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    """Return all that a cell shows, as text."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "\n".join(texts)


@BY_NAME
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert [(c.outputs, c.execution_count) for c in code_cells(notebook)] == [([], None)] * len(
        code_cells(notebook)
    )


@BY_NAME
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("jupyter_loop")
def test_a_notebook_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbclient import NotebookClient

    if path.stem == "03_ray":
        pytest.importorskip("ray")
        # A busy machine's memory is not this notebook's affair, and Ray would end workers over it.
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    CHECKS[path.stem]([shown(cell) for cell in code_cells(notebook)])


def check_quickstart(cells: list[str]) -> None:
    text = "\n".join(cells)
    assert "'The capital of France is' → ' Paris" in text
    for rank in (0, 1):
        assert f"[llmrt rank {rank}] hello from a worker" in text
    assert "[(0, 'cpu'), (1, 'cpu')]" in text or "cuda" in text
    assert text.count("ended_by='asked'") == 2


def check_lifecycle(cells: list[str]) -> None:
    text = "\n".join(cells)
    assert "[False, False]" in text
    assert "This is a Jupyter kernel" in text
    assert "start_method='spawn' was given" in text
    assert "interrupted" in text
    assert "WorkerDiedError" in text
    assert "SIGKILL" in text
    assert "' Paris" in cells[-2]


def check_ray(cells: list[str]) -> None:
    text = "\n".join(cells)
    assert "ray [0, 1]" in text
    assert "['REMOVED']" in text
    assert "2 bundles beside this process's own" in text
    assert text.count(" Paris") == 2


CHECKS = {
    "01_quickstart": check_quickstart,
    "02_lifecycle": check_lifecycle,
    "03_ray": check_ray,
}
