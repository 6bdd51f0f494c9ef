"""The names of an engine's options: what to say to somebody who used another one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from llmrt.config import EngineConfig

_NAMES_IN_VLLM = {
    "tensor_parallel_size": "tp",
    "gpu_memory_utilization": "gpu_memory_fraction",
    "distributed_executor_backend": "backend",
    "enable_prefix_caching": "prefix_caching",
    "max_seq_len": "max_model_len",
    "num_gpu_blocks_override": "kv_cache_bytes",
    "kv_cache_memory_bytes": "kv_cache_bytes",
}


def reject_unknown_options(unknown: Mapping[str, Any]) -> None:
    """Raise TypeError for the first option that an engine does not have, suggesting the nearest."""
    for name in unknown:
        raise TypeError(f"Engine() has no option {name!r}{_suggestion(name)}")


def _suggestion(name: str) -> str:
    if name in _NAMES_IN_VLLM:
        return f"; here it is called {_NAMES_IN_VLLM[name]!r}."
    options = [f.name for f in fields(EngineConfig)]
    nearest = difflib.get_close_matches(name, options, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f". It has: {', '.join(options)}."
