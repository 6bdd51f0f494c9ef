"""Compiled kernels are tried before a model relies on them."""

from __future__ import annotations

import pytest
import torch

from llmrt.worker.native.kernels import NativeKernels
from llmrt.worker.native.library import NoKernelsError
from llmrt.worker.native.trial import load_kernels
from tests.support.native import native_kernels


@pytest.mark.parametrize(
    "name",
    [
        "add_rms_norm",
        "silu_and_mul",
        "multiply_packed",
        "multiply_codes",
        "rotate_and_store",
        "attend_decodes",
        "attend_chunks",
    ],
)
def test_a_kernel_that_computes_something_else_is_used(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_kernels()  # they are right as they are
    right = getattr(NativeKernels, name)

    def wrong(self: NativeKernels, *args: torch.Tensor) -> torch.Tensor | None:
        found = right(self, *args)
        result = args[-1] if name.startswith("attend") else found
        if name == "rotate_and_store":
            result = args[2]  # the cache
        result.view(-1)[-1] += 1
        return found

    monkeypatch.setattr(NativeKernels, name, wrong)
    with pytest.raises(NoKernelsError, match=f"{name}.* gives other numbers"):
        load_kernels(lambda phase: None)
