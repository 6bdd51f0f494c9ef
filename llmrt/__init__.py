"""llmrt runs large language models inside a `with` block, and owns the processes that run them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmrt.version import __version__

if TYPE_CHECKING:
    from llmrt.async_engine import AsyncEngine
    from llmrt.config import Timeouts
    from llmrt.engine import Engine
    from llmrt.errors import (
        ConfigError,
        EngineAsleepError,
        EngineClosedError,
        EngineDeadError,
        EngineNotOpenError,
        EngineStartError,
        LlmrtError,
        RankFailure,
        RemoteCallError,
        RequestError,
        WorkerDiedError,
        WorkerFailedError,
        WorkerHungError,
    )
    from llmrt.lifecycle import EngineState
    from llmrt.outputs import (
        CloseReport,
        CompletionOutput,
        EngineStats,
        Increment,
        Logprob,
        RequestOutput,
        Score,
        TimelineEntry,
        WorkerCloseReport,
        WorkerInfo,
    )
    from llmrt.sampling import SamplingParams, StructuredOutput

_HOME = {
    "llmrt.async_engine": ("AsyncEngine",),
    "llmrt.config": ("Timeouts",),
    "llmrt.engine": ("Engine",),
    "llmrt.errors": (
        "ConfigError",
        "EngineAsleepError",
        "EngineClosedError",
        "EngineDeadError",
        "EngineNotOpenError",
        "EngineStartError",
        "LlmrtError",
        "RankFailure",
        "RemoteCallError",
        "RequestError",
        "WorkerDiedError",
        "WorkerFailedError",
        "WorkerHungError",
    ),
    "llmrt.lifecycle": ("EngineState",),
    "llmrt.outputs": (
        "CloseReport",
        "CompletionOutput",
        "EngineStats",
        "Increment",
        "Logprob",
        "RequestOutput",
        "Score",
        "TimelineEntry",
        "WorkerCloseReport",
        "WorkerInfo",
    ),
    "llmrt.sampling": ("SamplingParams", "StructuredOutput"),
}
"""By module: the public names that live there. They are imported when first asked for."""

_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AsyncEngine",
    "CloseReport",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineAsleepError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineNotOpenError",
    "EngineStartError",
    "EngineState",
    "EngineStats",
    "Increment",
    "LlmrtError",
    "Logprob",
    "RankFailure",
    "RemoteCallError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StructuredOutput",
    "TimelineEntry",
    "Timeouts",
    "WorkerCloseReport",
    "WorkerDiedError",
    "WorkerFailedError",
    "WorkerHungError",
    "WorkerInfo",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'llmrt' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
