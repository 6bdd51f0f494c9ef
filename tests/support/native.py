"""Compiled kernels for tests."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from llmrt.c_compiler import compiler_command
from llmrt.worker.device import Placement
from llmrt.worker.native.kernels import NativeKernels
from llmrt.worker.native.trial import load_kernels


def require_compiler() -> list[str]:
    """Return the command of the C compiler; skips where there is none."""
    command = compiler_command()
    if command is None:
        pytest.skip("there is no C compiler")
    return command


def native_kernels() -> NativeKernels:
    """Return the kernels; skips where there is no C compiler to make them."""
    require_compiler()
    return _kernels()


@cache
def _kernels() -> NativeKernels:
    return load_kernels(lambda phase: None)


def native_placement(quantization: str | None = None) -> Placement:
    """Return a CPU in bfloat16 with compiled kernels."""
    return Placement(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        quantization=quantization,
        kernels=native_kernels(),
    )
