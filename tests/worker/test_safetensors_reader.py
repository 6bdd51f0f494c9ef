from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from llmrt.errors import ConfigError
from llmrt.worker.weights.safetensors_reader import open_safetensors

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 538090408\n"
)
TENSORS = {
    "a.weight": torch.arange(24.0).view(6, 4),
    "b.weight": torch.arange(8, dtype=torch.bfloat16).view(2, 4),
    "c.bias": torch.arange(5, dtype=torch.float16),
}


class Reports:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.calls.append((phase, done, total))


def write_sharded(directory: Path) -> None:
    """Each tensor in a shard of its own, and the index."""
    weight_map: dict[str, str] = {}
    for i, (name, tensor) in enumerate(TENSORS.items(), 1):
        weight_map[name] = f"model-0000{i}-of-00003.safetensors"
        save_file({name: tensor}, directory / weight_map[name])
    write_index(directory, weight_map)


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_single(directory: Path) -> None:
    save_file(TENSORS, directory / "model.safetensors")


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_tensors_are_read_whole_and_in_parts(tmp_path: Path, write) -> None:  # noqa: ANN001
    write(tmp_path)
    reader = open_safetensors(tmp_path, Reports())
    for name, tensor in TENSORS.items():
        assert name in reader
        assert reader.shape(name) == tuple(tensor.shape)
        read = reader.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
    a = TENSORS["a.weight"]
    assert torch.equal(reader.read("a.weight", slice(2, 5)), a[2:5])
    assert torch.equal(reader.read("a.weight", None, slice(1, 3)), a[:, 1:3])
    assert torch.equal(reader.read("a.weight", slice(1, 2), slice(3, 4)), a[1:2, 3:4])
    assert torch.equal(reader.read("c.bias", slice(1, 4)), TENSORS["c.bias"][1:4])


def test_a_tensor_outlives_the_reader(tmp_path: Path) -> None:
    write_single(tmp_path)
    reader = open_safetensors(tmp_path, Reports())
    read = reader.read("a.weight", slice(2, 5))
    reader.close()
    assert torch.equal(read, TENSORS["a.weight"][2:5])


def test_reading_one_row_does_not_bring_in_the_file(tmp_path: Path) -> None:
    num_bytes = 2**28
    entry = {"dtype": "F32", "shape": [2**16, 2**10], "data_offsets": [0, num_bytes]}
    header = json.dumps({"big": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    before = psutil.Process().memory_info().rss
    reader = open_safetensors(tmp_path, Reports())
    assert reader.read("big", slice(2**15, 2**15 + 1)).sum() == 0
    assert psutil.Process().memory_info().rss - before < num_bytes // 8


def test_progress_counts_each_tensor_once_and_reaches_the_total(tmp_path: Path) -> None:
    write_single(tmp_path)
    reports = Reports()
    reader = open_safetensors(tmp_path, reports)
    reader.read("a.weight", slice(0, 1))
    reader.read("a.weight", slice(1, 2))
    reader.read("b.weight")
    reader.ignore("c.bias")
    reader.read("a.weight")
    assert reports.calls == [
        ("loading weights", 96, 122),
        ("loading weights", 96, 122),
        ("loading weights", 112, 122),
        ("loading weights", 122, 122),
    ]


def test_a_tensor_nobody_read_is_named(tmp_path: Path) -> None:
    write_single(tmp_path)
    reader = open_safetensors(tmp_path, Reports())
    reader.read("a.weight")
    with pytest.raises(ConfigError, match=r"2 tensor\(s\).*'b\.weight', 'c\.bias'\. Answers"):
        reader.check_all_read()


def test_what_is_ignored_or_derived_may_stay_unread(tmp_path: Path) -> None:
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(TENSORS | derived, tmp_path / "model.safetensors")
    reader = open_safetensors(tmp_path, Reports())
    reader.read("a.weight")
    reader.read("b.weight")
    reader.ignore("c.bias")
    reader.ignore("lm_head.weight")
    reader.check_all_read()


def test_many_left_over_tensors_are_counted_not_listed(tmp_path: Path) -> None:
    save_file({f"t{i}": torch.zeros(1) for i in range(9)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"9 tensor\(s\).*'t4' and 4 more"):
        open_safetensors(tmp_path, Reports()).check_all_read()


def test_a_tensor_that_is_not_there_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    write_single(tmp_path)
    reader = open_safetensors(tmp_path, Reports())
    assert "a.weights" not in reader
    for ask in (reader.read, reader.shape):
        with pytest.raises(ConfigError, match=r"no tensor 'a\.weights'.*nearest.*'a\.weight'"):
            ask("a.weights")


def test_a_shard_that_the_index_names_and_the_disk_lacks_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names 3 shard.*model-00002-of-00003\.safetensors"):
        open_safetensors(tmp_path, Reports())


def test_a_tensor_missing_from_the_shard_of_the_index_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"z": torch.zeros(1)}, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(ConfigError, match=r"model-00002.*has no tensor 'b\.weight'"):
        open_safetensors(tmp_path, Reports())


def test_a_tensor_in_two_shards_is_an_error(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    both = {"b.weight": TENSORS["b.weight"], "a.weight": TENSORS["a.weight"]}
    save_file(both, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(ConfigError, match=r"'a\.weight' is in model-00002.*another shard"):
        open_safetensors(tmp_path, Reports())


@pytest.mark.parametrize("cut", [1, 60])
def test_a_file_shorter_than_its_header_says_is_an_error(tmp_path: Path, cut: int) -> None:
    write_single(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    expected = (
        rf"cut short: its header describes {len(whole)} bytes, and the file has {len(whole) - cut}"
    )
    with pytest.raises(ConfigError, match=expected):
        open_safetensors(tmp_path, Reports())


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(LFS_POINTER)
    with pytest.raises(ConfigError, match=r"model\.safetensors is a Git LFS pointer.*git lfs pull"):
        open_safetensors(tmp_path, Reports())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        b"<html><body>404 not found</body></html>",
        (4).to_bytes(8, "little") + b"[1,]" + bytes(9),
        (8).to_bytes(8, "little") + b'{"a": 1}' + bytes(9),
        (6).to_bytes(8, "little") + b"[1, 2]" + bytes(9),
    ],
)
def test_a_file_that_is_not_safetensors_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is (not a safetensors|damaged)"):
        open_safetensors(tmp_path, Reports())


def test_trailing_garbage_is_damage(tmp_path: Path) -> None:
    write_single(tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConfigError, match="damaged"):
        open_safetensors(tmp_path, Reports())


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        open_safetensors(tmp_path, Reports())


def test_a_directory_without_weights_is_an_error_that_says_what_it_has(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    with pytest.raises(ConfigError, match=r"no weights.*it has consolidated\.safetensors"):
        open_safetensors(tmp_path, Reports())


def test_an_index_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the index of a sharded checkpoint"):
        open_safetensors(tmp_path, Reports())
