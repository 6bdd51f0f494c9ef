"""Matrices in every form multiply alike; quantisers against references of ten lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from llmrt.worker.device import Placement
from llmrt.worker.layers.linear import Linear
from llmrt.worker.matrices import kernels
from llmrt.worker.matrices.grouped_codes import GroupedCodes, quantize_to_groups, stack
from llmrt.worker.matrices.matrix import NativeMatrix, PackedMatrix, PlainMatrix
from llmrt.worker.matrices.quantized import (
    CodesMatrix,
    Int4Matrix,
    Int8Matrix,
    fits_kernels,
    quantize_rows,
    rows_as_groups,
)
from llmrt.worker.weights.gguf_reader import open_gguf
from tests.support.gguf_files import write_gguf_tensors
from tests.support.native import native_kernels, native_placement

BFLOAT16 = Placement(device=torch.device("cpu"), dtype=torch.bfloat16)
FLOAT32 = Placement(device=torch.device("cpu"), dtype=torch.float32)
FORMS: dict[str, Callable[[torch.Tensor], object]] = {
    "packed": PackedMatrix,
    "int4": lambda w: Int4Matrix(quantize_to_groups(w), PlainMatrix(w)),
    "int8": Int8Matrix,
    "native": lambda w: NativeMatrix(w, native_kernels()),
    "native int4": lambda w: CodesMatrix(quantize_to_groups(w), native_kernels()),
    "native int8": lambda w: CodesMatrix(rows_as_groups(w), native_kernels()),
}


def rows_of_every_kind() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(4, 96, generator=generator)
    one_sided = torch.rand(4, 96, generator=generator) + 3
    constant = torch.full((2, 96), -0.37)
    zero = torch.zeros(1, 96)
    outlier = torch.randn(4, 96, generator=generator) * 0.01
    outlier[:, 50] = 8.0
    return torch.cat((gaussian, one_sided, constant, zero, outlier))


def as_bfloat16(value: float) -> float:
    return torch.tensor(value).bfloat16().item()


def reference_int4(values: list[float]) -> tuple[list[int], list[float]]:
    scale = as_bfloat16((max(values) - min(values)) / 15)
    middle = as_bfloat16(min(values) + 8 * scale)
    if scale == 0:
        return [8] * len(values), [middle] * len(values)
    codes = [min(15, max(0, round((v - middle) / scale) + 8)) for v in values]
    return codes, [(code - 8) * scale + middle for code in codes]


def reference_int8(values: list[float]) -> tuple[list[int], list[float]]:
    scale = as_bfloat16(max(map(abs, values)) / 127)
    if scale == 0:
        return [0] * len(values), [0.0] * len(values)
    codes = [min(127, max(-127, round(v / scale))) for v in values]
    return codes, [code * scale for code in codes]


def test_codes_of_four_bits_differ_from_the_reference() -> None:
    weight = rows_of_every_kind()
    found = quantize_to_groups(weight)
    values = found.dequantize()
    for row in range(len(weight)):
        for start in range(0, 96, 32):
            columns = slice(start, start + 32)
            codes, expected = reference_int4(weight[row, columns].tolist())
            assert found.codes_OI[row, columns].tolist() == codes
            assert values[row, columns].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_codes_of_eight_bits_differ_from_the_reference() -> None:
    weight = rows_of_every_kind()
    codes_OI, scale_O = quantize_rows(weight)
    for row in range(len(weight)):
        codes, expected = reference_int8(weight[row].tolist())
        assert codes_OI[row].tolist() == codes
        assert (codes_OI[row] * scale_O[row].float()).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_form_multiplies_another_matrix(form: str, has_bias: bool, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    # Whole numbers up to 7 with a maximum in every group: 4 and 8 bits hold them exactly.
    weight = torch.randint(-7, 8, (48, 96), generator=generator).bfloat16()
    weight[:, ::32], weight[:, 1::32] = -7, 8
    x = torch.randn(num_tokens, 96, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16() if has_bias else None
    found = FORMS[form](weight).multiply(x, bias)  # type: ignore[attr-defined]
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    # 8 / 127 is no bfloat16, so codes of eight bits are off by up to half a step.
    tolerance = 0.02 if form.endswith("int8") else 0.006
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("quantization", [None, "int4", "int8"])
@pytest.mark.parametrize("shape", [(48, 64), (40, 64), (48, 50), (1, 3), (0, 64)])
def test_a_kernel_is_given_a_shape_it_cannot_multiply(
    shape: tuple[int, int], quantization: str | None, is_native: bool
) -> None:
    placement = replace(BFLOAT16, quantization=quantization)
    if is_native:
        placement = native_placement(quantization)
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    linear = Linear(shape[1], shape[0], placement)
    linear.load([weight[: shape[0] // 2], weight[shape[0] // 2 :]])
    for num_tokens in (1, 40):
        x = torch.randn(num_tokens, shape[1]).bfloat16()
        expected = F.linear(x.float(), weight.float())
        found = linear(x).float()
        assert found.shape == expected.shape
        # Four bits of a normal distribution: 0.08 for each weight; five deviations of the sum.
        assert torch.allclose(found, expected, atol=0.4 * shape[1] ** 0.5, rtol=0)


@pytest.mark.parametrize("missing", ["missing", "raises", "gives other numbers"])
def test_a_torch_without_the_private_operators_cannot_run(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> torch.Tensor:
        if missing == "raises":
            raise RuntimeError("no such kernel")
        return torch.zeros(1)

    fake = type("Matrix", (), {"multiply": broken})
    if missing == "missing":
        fake = type("Empty", (), {})
    assert not kernels.gives_the_same(lambda _: fake())
    monkeypatch.setattr(kernels, "_packing_works", lambda: False)
    linear = Linear(64, 32, BFLOAT16)
    linear.load([torch.eye(32, 64).bfloat16()])
    assert linear.weight is not None
    assert linear(torch.arange(64).bfloat16()[None])[0].tolist() == list(range(32))


def test_float32_is_packed_or_rounded() -> None:
    weight = torch.randn(32, 64)
    linear = Linear(64, 32, FLOAT32)
    linear.load([weight])
    x = torch.randn(3, 64)
    assert torch.equal(linear(x), F.linear(x, weight))
    assert linear.num_bytes == 0


def test_a_packed_matrix_is_kept_twice() -> None:
    linear = Linear(64, 32, BFLOAT16)
    linear.load([torch.randn(32, 64)])
    assert linear.weight is None
    assert linear.num_bytes == 32 * 64 * 2


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0"])
def test_codes_of_a_gguf_file_are_dequantised_and_quantised_again(
    type_name: str, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(8, 96, generator=generator).numpy()
    path, index = write_gguf_tensors(tmp_path, {"output.weight": (type_name, values)})
    reader = open_gguf(path, index, lambda phase, done=0, total=0: None)
    rows, columns = slice(2, 7), slice(32, 96)
    codes = reader.read_codes("lm_head.weight", rows, columns)
    assert isinstance(codes, GroupedCodes)
    exact = reader.read("lm_head.weight", rows, columns)
    assert torch.allclose(codes.dequantize(), exact, rtol=1e-6, atol=1e-6)
    assert reader.read_codes("lm_head.weight", None, slice(16, 96)) is None
    assert len(stack([codes, codes])) == 10
    reader.close()


@pytest.mark.parametrize(
    ("num_bits", "quantization", "bytes_per_weight"),
    [(4, None, 0.625), (4, "int4", 0.625), (4, "int8", 1.125),
     (8, None, 1.125), (8, "int4", 0.625), (8, "int8", 1.125)],
)  # fmt: skip
def test_codes_that_nobody_asked_for_are_kept(
    num_bits: int, quantization: str | None, bytes_per_weight: float
) -> None:
    weight = torch.randn(64, 96)
    codes = quantize_to_groups(weight) if num_bits == 4 else rows_as_groups(weight)
    linear = Linear(96, 64, native_placement(quantization))
    linear.load([codes])
    assert linear.num_bytes == bytes_per_weight * 64 * 96
    x = torch.randn(3, 96).bfloat16()
    expected = F.linear(x.float(), codes.dequantize())
    assert torch.allclose(linear(x).float(), expected, atol=0.4 * 96**0.5, rtol=0)


def test_codes_of_two_kinds_are_not_made_dense() -> None:
    weight = torch.randn(64, 96)
    linear = Linear(96, 64, native_placement())
    linear.load([quantize_to_groups(weight[:32]), rows_as_groups(weight[32:])])
    assert linear.num_bytes == 64 * 96 * 2
    x = torch.randn(3, 96).bfloat16()
    assert torch.allclose(
        linear(x).float(), F.linear(x.float(), weight), atol=0.4 * 96**0.5, rtol=0
    )


def test_which_shapes_the_kernels_take() -> None:
    assert fits_kernels(48, 64)
    assert not fits_kernels(40, 64)
    assert not fits_kernels(48, 48)
    assert not fits_kernels(0, 64)
