"""NativeKernels: the functions of the C files, on tensors. bfloat16 on a CPU only.

T tokens, D width of the residual stream or of a head, H heads, I intermediate size, N sequences,
M blocks of a block table, Q query heads, K KV heads.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmrt.worker.matrices.grouped_codes import GROUP_SIZE
from llmrt.worker.native.packing import COLUMNS, PackedCodes
from llmrt.worker.shard import HeadShard

MAX_GROUP = 16
MAX_HEAD_DIM = 256
CHUNK = 256
"""As in attention.c and matrices.c."""
_HEAD_DIM_UNIT = 32
_MAX_CODE_ROWS = 40
"""Up to so many rows the kernel on codes is faster than decoding them first (with AVX-512)."""
_NO_WINDOW = 1 << 40
_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "llmrt_add_rms_norm": (*[_POINTER] * 4, *[_SIZE] * 2, _FLOAT),
    "llmrt_silu_and_mul": (*[_POINTER] * 2, *[_SIZE] * 2),
    "llmrt_rotate_and_store": (*[_POINTER] * 5, *[_SIZE] * 5),
    "llmrt_multiply_packed": (*[_POINTER] * 4, *[_SIZE] * 4),
    "llmrt_multiply_codes": (*[_POINTER] * 6, *[_SIZE] * 5),
    "llmrt_decode_and_multiply": (*[_POINTER] * 6, *[_SIZE] * 6),
    "llmrt_attend_decodes": (*[_POINTER] * 7, *[_SIZE] * 9, _FLOAT),
    "llmrt_attend_chunks": (*[_POINTER] * 9, *[_SIZE] * 9, _FLOAT),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedSpans:
    """Sequences that run some tokens each, and where their contexts lie in the cache."""

    tables_NM: Tensor
    """Block tables, int32; behind the end of a shorter one stands anything."""
    rows_N: Tensor
    """First row of each among the tokens of the step."""
    starts_N: Tensor
    """Position of that token in its sequence."""
    lengths_N: Tensor
    """How many tokens each runs."""
    ends_N: Tensor
    """Position after the last of them."""
    longest: int
    """The largest of these."""

    def __len__(self) -> int:
        return len(self.rows_N)


class HeadLayout:
    """Which query heads share a KV head, as attention.c reads it."""

    def __init__(self, heads: HeadShard) -> None:
        self.num_heads = heads.num_heads
        self.num_kv_heads = heads.num_kv_heads
        firsts = [heads.kv_head_of_query_head.index(k) for k in range(heads.num_kv_heads)]
        self.starts = torch.tensor([*firsts, heads.num_heads], dtype=torch.int32)


def can_attend(heads: HeadShard, head_dim: int) -> bool:
    """Return whether attention.c takes heads of this size and number."""
    largest_group = max(heads.kv_head_of_query_head.count(k) for k in range(heads.num_kv_heads))
    return (
        head_dim % _HEAD_DIM_UNIT == 0 and head_dim <= MAX_HEAD_DIM and largest_group <= MAX_GROUP
    )


def _sizes(spans: PagedSpans, layout: HeadLayout, cache_HNBD: Tensor) -> tuple[int, ...]:
    """Return what both kinds of attention are told of their tensors' shapes."""
    _, num_blocks, block_size, head_dim = cache_HNBD.shape
    num_sequences, table_width = spans.tables_NM.shape
    return (
        num_sequences,
        table_width,
        layout.num_heads,
        layout.num_kv_heads,
        head_dim,
        num_blocks * block_size,
        block_size,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeKernels:
    """Calls into the library. Tensors are contiguous, in bfloat16 where nothing else is said."""

    def __init__(self, library: ctypes.CDLL) -> None:
        functions = {}
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None
            functions[name.removeprefix("llmrt_")] = function
        self._add_rms_norm = functions["add_rms_norm"]
        self._silu_and_mul = functions["silu_and_mul"]
        self._rotate_and_store = functions["rotate_and_store"]
        self._multiply_packed = functions["multiply_packed"]
        self._multiply_codes = functions["multiply_codes"]
        self._decode_and_multiply = functions["decode_and_multiply"]
        self._attend_decodes = functions["attend_decodes"]
        self._attend_chunks = functions["attend_chunks"]
        library.llmrt_workspace_size.restype = _SIZE
        self._workspace_size: int = library.llmrt_workspace_size()

    def add_rms_norm(
        self, x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> Tensor:
        """Add *y_TD*, if there is one, to *x_TD*; return x / sqrt(mean(x²) + eps) · weight.

        Args:
            x_TD: in float32.
            y_TD: what is added.
            weight_D: in float32.
            eps: added to the mean.
        """
        num_rows, width = x_TD.shape
        out_TD = torch.empty(num_rows, width, dtype=torch.bfloat16)
        self._add_rms_norm(
            x_TD.data_ptr(),
            _address(y_TD),
            weight_D.data_ptr(),
            out_TD.data_ptr(),
            num_rows,
            width,
            eps,
        )
        return out_TD

    def silu_and_mul(self, gate_up_TI: Tensor) -> Tensor:
        """Return silu(gate) · up of rows that hold one behind the other."""
        num_rows, width = len(gate_up_TI), gate_up_TI.shape[1] // 2
        out_TI = torch.empty(num_rows, width, dtype=torch.bfloat16)
        self._silu_and_mul(gate_up_TI.data_ptr(), out_TI.data_ptr(), num_rows, width)
        return out_TI

    def multiply_packed(
        self,
        x_TI: Tensor,
        packed: Tensor,
        bias_O: Tensor | None,
        num_outputs: int,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Return y_TO = x Wᵀ + b.

        Args:
            x_TI: rows of an even number of inputs.
            packed: the matrix as `pack` makes it.
            bias_O: what is added, or None.
            num_outputs: rows of the matrix before it was packed.
            out_dtype: bfloat16, or float32 for sums that are not rounded.
        """
        num_rows, num_inputs = x_TI.shape
        out_TO = torch.empty(num_rows, num_outputs, dtype=out_dtype)
        self._multiply_packed(
            x_TI.data_ptr(),
            packed.data_ptr(),
            _address(bias_O),
            out_TO.data_ptr(),
            num_rows,
            num_inputs,
            num_outputs,
            out_dtype == torch.float32,
        )
        return out_TO

    def multiply_codes(
        self,
        x_TI: Tensor,
        matrix: PackedCodes,
        bias_O: Tensor | None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Return y_TO = x Wᵀ + b.

        Args:
            x_TI: rows of whole groups of inputs.
            matrix: codes of a multiple of 16 outputs.
            bias_O: what is added, or None.
            out_dtype: bfloat16, or float32 for sums that are not rounded.
        """
        num_rows, num_inputs = x_TI.shape
        out_TO = torch.empty(num_rows, matrix.num_outputs, dtype=out_dtype)
        pointers = (
            x_TI.data_ptr(),
            matrix.words.data_ptr(),
            matrix.scales_and_middles.data_ptr(),
            _address(bias_O),
        )
        is_whole = out_dtype == torch.float32
        sizes = (num_rows, num_inputs, matrix.num_outputs, is_whole, matrix.num_bits)
        if num_rows <= _MAX_CODE_ROWS:
            group_sums = torch.empty(num_rows * num_inputs // GROUP_SIZE, dtype=torch.float32)
            self._multiply_codes(*pointers, group_sums.data_ptr(), out_TO.data_ptr(), *sizes)
        else:
            num_threads = torch.get_num_threads()
            blocks = torch.empty(num_threads, num_inputs // 2, COLUMNS, dtype=torch.int32)
            self._decode_and_multiply(
                *pointers, blocks.data_ptr(), out_TO.data_ptr(), *sizes, num_threads
            )
        return out_TO

    def rotate_and_store(
        self,
        qkv_THD: Tensor,
        angles: tuple[Tensor, Tensor],
        cache_HNBD: Tensor,
        slots_T: Tensor,
        num_kv_heads: int,
    ) -> None:
        """Rotate query and key heads in place; put keys and values into the cache of their layer.

        Args:
            qkv_THD: query heads, key heads, value heads.
            angles: cos_T1D and sin_T1D; sin is negative in its first half.
            cache_HNBD: key heads, then value heads.
            slots_T: for each token block number x block size + place in the block.
            num_kv_heads: how many of the heads are keys.
        """
        cos_T1D, sin_T1D = angles
        num_tokens, num_heads, head_dim = qkv_THD.shape
        self._rotate_and_store(
            qkv_THD.data_ptr(),
            cos_T1D.data_ptr(),
            sin_T1D.data_ptr(),
            cache_HNBD.data_ptr(),
            slots_T.data_ptr(),
            num_tokens,
            num_heads - 2 * num_kv_heads,
            num_kv_heads,
            head_dim,
            cache_HNBD.shape[1] * cache_HNBD.shape[2],
        )

    def attend_decodes(
        self,
        qkv_NHD: Tensor,
        cache_HNBD: Tensor,
        spans: PagedSpans,
        layout: HeadLayout,
        window: int | None,
        out_NQD: Tensor,
    ) -> None:
        """Attention of sequences that run one token each, into *out_NQD*."""
        head_dim = qkv_NHD.shape[2]
        num_chunks = -(-spans.longest // CHUNK)
        num_parts = len(spans) * num_chunks * layout.num_heads
        scratch = torch.empty(num_parts * (head_dim + 2), dtype=torch.float32)
        self._attend_decodes(
            qkv_NHD.data_ptr(),
            cache_HNBD.data_ptr(),
            spans.tables_NM.data_ptr(),
            spans.ends_N.data_ptr(),
            layout.starts.data_ptr(),
            scratch.data_ptr(),
            out_NQD.data_ptr(),
            *_sizes(spans, layout, cache_HNBD),
            num_chunks,
            window or _NO_WINDOW,
            1 / math.sqrt(head_dim),
        )

    def attend_chunks(
        self,
        qkv_THD: Tensor,
        cache_HNBD: Tensor,
        spans: PagedSpans,
        layout: HeadLayout,
        window: int | None,
        out_TQD: Tensor,
    ) -> None:
        """Attention of chunks of prompts, into their rows of *out_TQD*."""
        head_dim = qkv_THD.shape[2]
        num_threads = torch.get_num_threads()
        workspaces = torch.empty(num_threads, self._workspace_size, dtype=torch.uint8)
        self._attend_chunks(
            qkv_THD.data_ptr(),
            cache_HNBD.data_ptr(),
            spans.tables_NM.data_ptr(),
            spans.rows_N.data_ptr(),
            spans.starts_N.data_ptr(),
            spans.lengths_N.data_ptr(),
            layout.starts.data_ptr(),
            workspaces.data_ptr(),
            out_TQD.data_ptr(),
            *_sizes(spans, layout, cache_HNBD),
            window or _NO_WINDOW,
            num_threads,
            1 / math.sqrt(head_dim),
        )
