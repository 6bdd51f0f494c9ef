"""GgufReader: tensors of one GGUF file, found by an index, mapped, and decoded block by block.

The header of a GGUF file is slow to parse, so the driver does it once and leaves an index:

    {"architecture": "llama", "head_dim": 64, "num_heads": 9, "num_kv_heads": 3,
     "data": [{"name": "blk.0.attn_q.weight", "type": "Q4_1", "shape": [576, 576],
               "offset": 33806656, "nbytes": 207360}, ...]}

with shapes in torch's order and offsets from the start of the file.

Files of the `llama` architecture hold the rows of q and k in another order: ggml rotates
neighbouring pairs, transformers the two halves of a head. Row `h, j, s` there is row `h, s, j` here
(head, pair, side).

R rows, B bytes of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llmrt.config import ReportProgress
from llmrt.errors import ConfigError
from llmrt.worker.matrices.grouped_codes import GroupedCodes
from llmrt.worker.weights.gguf_blocks import BLOCK_FORMATS, BlockFormat
from llmrt.worker.weights.gguf_names import transformers_name
from llmrt.worker.weights.read_record import ReadRecord

PAIRED_SUFFIXES = tuple(
    f"self_attn.{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")
)
"""Tensors whose rows a `llama` file keeps in the order of rotated pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Where one tensor lies in the file, and how."""

    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    rows_are_paired: bool

    @property
    def num_rows(self) -> int:
        """Rows of the matrix; a vector counts as a column."""
        return self.shape[0]

    @property
    def num_columns(self) -> int:
        """Values of a row."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def format(self) -> BlockFormat:
        """How its rows are stored."""
        return BLOCK_FORMATS[self.type_name]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRows:
    """Rows of a tensor as they are stored, in transformers' order."""

    type_name: str
    num_columns: int
    data: torch.Tensor
    """uint8 of shape RB; maps the file, or is a copy where rows changed places."""


def open_gguf(path: Path, index_path: Path, report: ReportProgress) -> GgufReader:
    """Map a GGUF file whose tensors *index_path* lists.

    Raises:
        ConfigError: the file is missing or cut short, or a tensor has a type llmrt cannot decode.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file. Name a GGUF file, or the directory of a model.")
    index = json.loads(index_path.read_bytes())
    tensors = _list_tensors(path, index)
    file_bytes = path.stat().st_size
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor, file_bytes)
    mapped = torch.from_file(str(path), shared=False, size=file_bytes, dtype=torch.uint8)
    record = ReadRecord(path, {name: t.num_bytes for name, t in tensors.items()}, report)
    return GgufReader(record, tensors, mapped, head_dim=index["head_dim"])


class GgufReader:
    """Dequantises to float32, exactly; touches only the blocks that are asked for."""

    def __init__(
        self,
        record: ReadRecord,
        tensors: Mapping[str, GgufTensor],
        mapped: torch.Tensor,
        *,
        head_dim: int,
    ) -> None:
        """Take over the mapped file (uint8)."""
        self._record = record
        self._tensors = tensors
        self._mapped: torch.Tensor | None = mapped
        self._head_dim = head_dim

    def __contains__(self, name: str) -> bool:
        return name in self._record

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        self._record.require(name)
        return self._tensors[name].shape

    def read(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """Return these rows and columns: F32, F16 and BF16 as stored, all else as float32."""
        raw = self.read_raw(name, rows)
        values_RC = _decode(raw, columns or slice(None))
        return values_RC.flatten() if len(self.shape(name)) == 1 else values_RC

    def read_codes(
        self, name: str, rows: slice | None = None, columns: slice | None = None
    ) -> GroupedCodes | None:
        """Return these rows and columns as the codes in the file, where it has some."""
        self._record.require(name)
        tensor = self._tensors[name]
        group = tensor.format.group
        start, stop, _ = (columns or slice(None)).indices(tensor.num_columns)
        size = tensor.format.num_values
        if group is None or start % size or stop % size:
            return None
        data_RB = self.read_raw(name, rows).data
        blocks_RGB = data_RB.unflatten(1, (-1, tensor.format.num_bytes))
        return group(blocks_RGB[:, start // size : stop // size])

    def read_raw(self, name: str, rows: slice | None = None) -> RawRows:
        """Return these rows as blocks, for who keeps them quantised.

        Raises:
            ConfigError: the checkpoint has no such tensor.
        """
        self._record.require(name)
        self._record.mark_read(name)
        assert self._mapped is not None, "the reader is closed"
        tensor = self._tensors[name]
        data = self._mapped[tensor.offset : tensor.offset + tensor.num_bytes]
        data_RB = data.view(tensor.num_rows, -1)
        start, stop, _ = (rows or slice(None)).indices(tensor.num_rows)
        data_RB = (
            _read_paired(data_RB, start, stop, self._head_dim)
            if tensor.rows_are_paired
            else data_RB[start:stop]
        )
        return RawRows(type_name=tensor.type_name, num_columns=tensor.num_columns, data=data_RB)

    def ignore(self, name: str) -> None:
        """Leave a tensor out of `check_all_read`."""
        self._record.ignore(name)

    def check_all_read(self) -> None:
        """Raise ConfigError naming the tensors that nobody has read or ignored."""
        self._record.check_all_read()

    def close(self) -> None:
        """Let go of the file; it stays mapped while a tensor that was read is alive."""
        self._mapped = None


def _read_paired(data_RB: torch.Tensor, start: int, stop: int, head_dim: int) -> torch.Tensor:
    """Return rows [start, stop) with the halves of each head apart; reads whole heads."""
    first = start // head_dim * head_dim
    last = -(-stop // head_dim) * head_dim
    heads_HJSB = data_RB[first:last].unflatten(0, (-1, head_dim // 2, 2))
    return heads_HJSB.transpose(1, 2).flatten(0, 2)[start - first : stop - first]


def _decode(raw: RawRows, columns: slice) -> torch.Tensor:
    block_format = BLOCK_FORMATS[raw.type_name]
    start, stop, _ = columns.indices(raw.num_columns)
    first = start // block_format.num_values
    last = -(-stop // block_format.num_values)
    blocks_RNB = raw.data.unflatten(1, (-1, block_format.num_bytes))[:, first:last]
    values_RC = block_format.decode(blocks_RNB).flatten(1)
    skipped = first * block_format.num_values
    return values_RC[:, start - skipped : stop - skipped]


def _list_tensors(path: Path, index: Mapping[str, Any]) -> dict[str, GgufTensor]:
    paired = PAIRED_SUFFIXES if index["architecture"] == "llama" else ()
    tensors: dict[str, GgufTensor] = {}
    for entry in index["data"]:
        name = transformers_name(entry["name"])
        if name in tensors:
            raise ConfigError(f"{path} holds tensor {entry['name']!r} twice. Download it again.")
        tensors[name] = GgufTensor(
            type_name=entry["type"],
            shape=tuple(entry["shape"]),
            offset=entry["offset"],
            num_bytes=entry["nbytes"],
            rows_are_paired=name.endswith(paired),
        )
    return tensors


def _check_tensor(path: Path, name: str, tensor: GgufTensor, file_bytes: int) -> None:
    if tensor.type_name not in BLOCK_FORMATS:
        raise ConfigError(
            f"{path}: tensor {name!r} is stored as {tensor.type_name}; llmrt reads "
            f"{', '.join(BLOCK_FORMATS)}. Take a file of these types, or the model as safetensors."
        )
    end = tensor.offset + tensor.num_bytes
    if end > file_bytes:
        raise ConfigError(
            f"{path} is cut short: tensor {name!r} ends at byte {end:,}, and the file has "
            f"{file_bytes:,}. Download it again."
        )
    stored = tensor.format
    blocks, rest = divmod(tensor.num_columns, stored.num_values)
    needed = tensor.num_rows * blocks * stored.num_bytes
    if len(tensor.shape) > 2 or rest or needed != tensor.num_bytes:
        raise ConfigError(
            f"{path}: tensor {name!r} of shape {list(tensor.shape)} and type {tensor.type_name} "
            f"cannot be {tensor.num_bytes:,} bytes long: the file is damaged, or holds a kind of "
            "tensor that llmrt does not know."
        )
