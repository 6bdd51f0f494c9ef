from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from llmrt.checkpoint import gguf_file
from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.checkpoint.gguf_file import open_gguf
from llmrt.checkpoint.resolve import resolve
from llmrt.display.progress import Progress
from llmrt.errors import ConfigError
from tests.support.gguf_models import write_gguf_model

QUIET = Progress(False)


def read(path: Path) -> Checkpoint:
    return open_gguf(path, name=path.stem, progress=QUIET)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf_model(tmp_path_factory.mktemp("gguf") / "whole.gguf")


def test_a_gguf_file_is_a_checkpoint(whole: Path) -> None:
    found = resolve(whole, progress=QUIET)
    assert (found.name, found.weights) == ("whole", str(whole))
    assert found.config["architectures"] == ["LlamaForCausalLM"]
    assert found.has_tokenizer


def test_the_index_says_where_every_tensor_lies(whole: Path) -> None:
    found = read(whole)
    assert found.gguf_index is not None
    index = json.loads(Path(found.gguf_index).read_text())
    content = whole.read_bytes()
    tensors = {tensor.name: tensor for tensor in GGUFReader(whole).tensors}
    assert [entry["name"] for entry in index["data"]] == list(tensors)
    for entry in index["data"]:
        tensor = tensors[entry["name"]]
        stored = content[entry["offset"] : entry["offset"] + entry["nbytes"]]
        assert entry["type"] == "F32"
        assert stored == tensor.data.tobytes()
        assert entry["shape"] == list(tensor.data.shape)
    assert {key: index[key] for key in ("head_dim", "num_heads", "num_kv_heads")} == {
        "head_dim": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
    }
    assert index["architecture"] == "llama"


def test_the_header_is_read_once(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(whole)
    monkeypatch.setattr(gguf_file, "run_module", None)
    assert read(whole) == first


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "model.gguf")
    first = read(path)
    write_gguf_model(path, metadata={"llama.context_length": 64})
    os.utime(path, ns=(1, 1))
    assert read(path).config["max_position_embeddings"] == 64
    assert first.config["max_position_embeddings"] == 512


def test_the_users_process_imports_neither_gguf_nor_numpy(whole: Path) -> None:
    code = (
        "import sys\nfrom llmrt.checkpoint.resolve import resolve\n"
        "from llmrt.display.progress import Progress\n"
        "resolve(sys.argv[1], progress=Progress(False))\n"
        "print({'gguf', 'numpy', 'torch', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(whole)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


# ---- damage ----


def damaged(path: Path, content: bytes) -> str:
    """Return the message about a file with this content; the cache must stay empty."""
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("fraction", [0.0001, 0.01, 0.1, 0.3, 0.9])
def test_a_file_cut_short_is_named_and_not_cached(
    fraction: float, whole: Path, tmp_path: Path, cache: Path
) -> None:
    content = whole.read_bytes()
    message = damaged(tmp_path / "cut.gguf", content[: max(8, int(len(content) * fraction))])
    assert "cut short" in message
    assert [path for path in cache.rglob("*") if path.suffix != ".lock"] == [cache / "gguf"]


def test_a_file_without_its_last_bytes_is_named(whole: Path, tmp_path: Path) -> None:
    assert "cut short" in damaged(tmp_path / "cut.gguf", whole.read_bytes()[:-4])


@pytest.mark.slow
def test_a_header_that_claims_endless_arrays_ends(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    numbers = content.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type")
    cut = content[: numbers + 8] + struct.pack("<Q", 1 << 60)  # how many numbers follow
    assert "more than memory holds" in damaged(tmp_path / "endless.gguf", cut)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"", "not a GGUF file"),
    ],
)
def test_what_is_no_gguf_file_is_told_by_its_first_bytes(
    content: bytes, expected: str, tmp_path: Path
) -> None:
    assert expected in damaged(tmp_path / "other.gguf", content)


# ---- what is not supported ----


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architecture": "gemma"}, "'gemma' is not supported; supported are llama"),
        ({"metadata": {"llama.expert_count": 8}}, "Mixture-of-experts"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer of kind 'bert'"),
        ({"metadata": {"tokenizer.ggml.pre": "newest"}}, "cuts text as 'newest'"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "8 of 16 dimensions"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "'longrope'"),
        ({"without": ["llama.block_count"]}, r"lacks llama.block_count"),
        ({"without": ["token_embd.weight"]}, "no whole model"),
        ({"tensors": {"rope_freqs.weight": np.full(8, 3.0, np.float32)}}, "follow no rule"),
    ],
)
def test_what_is_not_supported_is_said(
    changes: dict[str, object], expected: str, tmp_path: Path
) -> None:
    path = write_gguf_model(tmp_path / "odd.gguf", **changes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
