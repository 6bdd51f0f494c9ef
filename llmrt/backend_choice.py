"""Which launcher starts the workers of an engine, and why."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from llmrt.config import EngineConfig
from llmrt.errors import ConfigError
from llmrt.ray import PLACEMENT_GROUP_VARIABLE, placement_group_from_env
from llmrt.runtime import placement, ray_cluster
from llmrt.runtime.cores import available_cores
from llmrt.runtime.environment import Environment
from llmrt.runtime.launchers.base import Launcher
from llmrt.runtime.placement import RayRequest

_LAUNCHERS = {
    "mp": "llmrt.runtime.launchers.mp:MpLauncher",
    "ray": "llmrt.runtime.launchers.ray:RayLauncher",
    "inprocess": "llmrt.runtime.launchers.inprocess:InProcessLauncher",
}
"""By name: the class that starts workers, imported when it is chosen."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Which launcher starts the workers, and why."""

    name: str
    reason: str
    launcher: Launcher


def choose_backend(options: EngineConfig, environment: Environment) -> Backend:
    """Return the launcher for the `backend=` option, with the reason.

    Called in the thread that opens the engine: Ray knows which placement group that is in.

    Raises:
        ConfigError: this machine or this version cannot run it.
    """
    backend = options.backend
    if not isinstance(backend, str):
        return Backend(name=type(backend).__name__, reason="backend= given", launcher=backend)
    reason = "backend= given"
    if backend == "auto":
        backend, reason = _choose_name(options, environment)
    if backend == "ray":
        return Backend(name="ray", reason=reason, launcher=_launcher("ray", _ray_request(options)))
    if options.placement_group is not None:
        raise ConfigError(f'placement_group= is for backend="ray", not for backend={backend!r}.')
    if backend == "inprocess":
        return _inprocess(options.tp, reason)
    return _mp(reason)


def _launcher(name: str, *arguments: Any) -> Launcher:
    module, _, launcher = _LAUNCHERS[name].partition(":")
    return getattr(import_module(module), launcher)(*arguments)


def _inprocess(tp: int, reason: str) -> Backend:
    if tp != 1:
        raise ConfigError(f'backend="inprocess" runs one rank: tp must be 1, not {tp}.')
    return Backend(name="inprocess", reason=reason, launcher=_launcher("inprocess"))


def _mp(reason: str) -> Backend:
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f'backend="mp" runs on Linux only, this is {sys.platform}; use backend="inprocess".'
        )
    return Backend(name="mp", reason=reason, launcher=_launcher("mp"))


# ---- Ray ----


def _ray_request(options: EngineConfig) -> RayRequest:
    if not sys.platform.startswith("linux"):
        raise ConfigError(f'backend="ray" runs on Linux only, this is {sys.platform}.')
    ray_cluster.check_installation()
    ray_cluster.check_mode()
    return RayRequest(
        group=_find_group(options.placement_group),
        device=options.device,
        num_cpus=float(options.num_threads or 1),
    )


def _find_group(given: Any | None) -> Any | None:
    """Return the group to use: the option's, the environment's, this process's own, or None."""
    if given is not None:
        if not (hasattr(given, "id") and hasattr(given, "bundle_specs")):
            raise ConfigError(
                "placement_group= takes what ray.util.placement_group() returns, not "
                f"{type(given).__name__}."
            )
        return given
    named = placement_group_from_env()
    return named if named is not None else ray_cluster.current_group()


# ---- backend="auto" ----


def _choose_name(options: EngineConfig, environment: Environment) -> tuple[str, str]:
    """Return `ray` or `mp` for `auto`. Ray is asked only where it is initialised already."""
    if options.placement_group is not None:
        return "ray", "placement_group= given"
    if os.environ.get(PLACEMENT_GROUP_VARIABLE):
        return "ray", f"the environment variable {PLACEMENT_GROUP_VARIABLE} is set"
    if environment.ray is None:
        return "mp", "the workers fit on this machine"
    try:
        ray_cluster.check_installation()
        ray_cluster.check_mode()
    except ConfigError as error:
        return "mp", f"Ray cannot be used here: {error}"
    return _choose_in_cluster(options)


def _choose_in_cluster(options: EngineConfig) -> tuple[str, str]:
    tp = options.tp
    group = ray_cluster.current_group()
    if group is not None:
        others = [b for b in ray_cluster.bundles_of(group) if not b.is_callers]
        num_gpus = len(placement.fitting(others, needs_gpu=True))
        needs_gpu = placement.wants_gpu(options.device, tp, num_gpus)
        num_fitting = len(placement.fitting(others, needs_gpu=needs_gpu))
        if num_fitting >= tp:
            what = f"this placement group has {num_fitting} bundles beside this process's own"
            return "ray", f"{what}, enough for tp={tp}"
    kind, num_given = _num_given(options.device, tp)
    if num_given < tp <= ray_cluster.num_in_cluster(kind):
        return "ray", f"tp={tp} is more than the {num_given} {kind} given to this process"
    return "mp", f"tp={tp} fits on the {num_given} {kind} given to this process"


def _num_given(device: str, tp: int) -> tuple[str, int]:
    """Return what this process was given, by Ray if it is a worker of Ray's: of GPUs or of CPUs."""
    in_worker = ray_cluster.is_worker()
    num_gpus = int(ray_cluster.num_assigned("GPU")) if in_worker else _num_visible_gpus()
    if placement.wants_gpu(device, tp, max(num_gpus, ray_cluster.num_in_cluster("GPU"))):
        return "GPU", num_gpus
    if in_worker:
        return "CPU", max(1, int(ray_cluster.num_assigned("CPU")))
    return "CPU", available_cores()


def _num_visible_gpus() -> int:
    """Return how many NVIDIA GPUs this process may use, without opening their driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])
