"""What of this process each of its workers gets: threads, and environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from llmrt.config import EngineConfig
from llmrt.runtime import ray_cluster
from llmrt.runtime.cores import available_cores, threads_per_rank
from llmrt.runtime.environment import Environment
from llmrt.runtime.forwarded_environment import NO_DEVICES, forwarded

_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerShare:
    """What every worker of an engine gets."""

    num_threads: int | None
    """None leaves it to the worker's environment."""
    env: dict[str, str] = field(repr=False)


def worker_share(
    options: EngineConfig, environment: Environment, *, on_cluster: bool
) -> WorkerShare:
    """Return the share of each worker.

    Workers on a cluster are given threads by the actors that hold their cores. In a process of
    Ray's, cores and GPUs are those that Ray assigned to it, and the OMP_NUM_THREADS that Ray sets
    is nobody's wish.
    """
    environ, env = dict(os.environ), dict(options.env or {})
    is_ray_worker = environment.ray == "worker"
    if is_ray_worker and not ray_cluster.is_set_by_runtime_env(_THREADS):
        environ.pop(_THREADS, None)
    if on_cluster:
        return WorkerShare(num_threads=options.num_threads, env=forwarded(environ, env))
    cores = available_cores()
    if is_ray_worker:
        cores = max(1, min(cores, int(ray_cluster.num_assigned("CPU"))))
        if options.device == "auto" and not ray_cluster.num_assigned("GPU"):
            env = {**NO_DEVICES, **env}
    num_threads = options.num_threads or threads_per_rank(
        options.tp, {**environ, **env}, cores=cores
    )
    return WorkerShare(num_threads=num_threads, env=env)
