from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLMRT_CACHE", str(folder))
    return folder


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the import path, of subprocesses too."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def no_network(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make every way to the network fail; return the file that says who tried."""
    tried = packages / "tried"
    for name in ("pip", "huggingface_hub"):
        (packages / f"{name}.py").write_text(
            f"open({str(tried)!r}, 'a').write('{name} ')\nraise OSError('no network')\n"
        )

    def refuse(*args: object, **kwargs: object) -> None:
        tried.write_text("socket")
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    return tried
