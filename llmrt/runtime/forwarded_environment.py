"""Which environment variables of the engine's process its workers on a cluster are given.

A worker that Ray starts inherits the environment of its node, not the user's. Only what steers the
libraries that a worker loads is sent; everything else may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping

FORWARDED_PREFIXES = (
    "LLMRT_",
    "HF_",
    "HUGGING_FACE_",
    "TRANSFORMERS_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "DNNL_",
    "ONEDNN_",
    "OPENBLAS_",
)
"""How the names of variables begin that are sent to every rank, with equal values."""
_NEVER_SUFFIX = "_VISIBLE_DEVICES"
"""Whose devices a worker may use is Ray's to say, on the worker's node."""


def forwarded(environ: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for workers on a cluster; `env`, the user's option, goes whole."""
    chosen = {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED_PREFIXES) and not name.endswith(_NEVER_SUFFIX)
    }
    return {**chosen, **env}


NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""What hides every GPU from a process."""
