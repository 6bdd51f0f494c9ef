"""What runs inside the driver of a Ray test: groups of fake workers, and what is left of them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from llmrt import Engine, SamplingParams
from llmrt.config import Timeouts
from llmrt.runtime.launchers.ray import RayLauncher
from llmrt.runtime.placement import RayRequest
from tests.runtime.conftest import HeardGroup, new_group

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The capital", "a", "Once upon a time there was"]
PATIENT = Timeouts(start_progress=40.0, step=30.0, close=10.0)


def new_ray_group(
    num_ranks: int = 2,
    *,
    placement_group: Any = None,
    device: str = "cpu",
    num_cpus: float = 1.0,
    **options: Any,
) -> HeardGroup:
    """Return a group of fake workers that Ray will place."""
    request = RayRequest(group=placement_group, device=device, num_cpus=num_cpus)
    options.setdefault("timeouts", PATIENT)
    return new_group(num_ranks=num_ranks, launcher=RayLauncher(request), **options)


@contextmanager
def ray_group(num_ranks: int = 2, **options: Any) -> Iterator[HeardGroup]:
    """Start a group of fake workers, and close it."""
    group = new_ray_group(num_ranks, **options)
    try:
        group.start()
        yield group
    finally:
        group.close()


@contextmanager
def placement_group(bundles: list[dict[str, float]], **options: Any) -> Iterator[Any]:
    """Make a user's group, and remove it."""
    import ray

    group = ray.util.placement_group(bundles, **options)
    try:
        assert group.wait(20)
        yield group
    finally:
        ray.util.remove_placement_group(group)


def actor_pid_of(rank_pid: int) -> int:
    """Return the pid of the actor above a rank: the rank's guard is the actor's child."""
    guard = psutil.Process(rank_pid).parent()
    assert guard is not None
    assert guard.name() == "llmrt-guard"
    actor = guard.parent()
    assert actor is not None
    return actor.pid


def left_in_cluster() -> list[str]:
    """Return what engines have left in the cluster, in words; what is going gets a moment."""
    return _settled(_left_in_cluster)


def _left_in_cluster() -> list[str]:
    import ray
    from ray._private import state

    groups = ray.util.placement_group_table().values()
    left = [f"group {g['name']} {g['state']}" for g in groups if g["state"] != "REMOVED"]
    left += [
        f"actor {a['ActorClassName']} {a['State']}"
        for a in state.actors().values()
        if a["ActorClassName"] == "RankActor" and a["State"] != "DEAD"
    ]
    left += [f"process {p}" for p in llmrt_processes()]
    return left


def llmrt_processes() -> list[str]:
    """Return the guards and ranks among this process's descendants."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("llmrt-") and process.status() != "zombie":
                found.append(f"{process.pid} {process.name()}")
        except psutil.NoSuchProcess:
            continue
    return found


def _settled(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + 5
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def descriptors_not_rays() -> Counter[str]:
    """Count this process's descriptors by kind, without the TCP connections that Ray makes."""
    process = psutil.Process()
    kinds = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)
    ]
    counts = Counter(kind for kind in kinds if kind.startswith("anon_inode"))
    counts["unix socket"] = len(process.net_connections("unix"))
    counts["listening"] = sum(
        c.status == psutil.CONN_LISTEN for c in process.net_connections("inet")
    )
    return counts


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def wildcard_ports(pid: int) -> set[int]:
    """Return the ports on which a process listens on every address of this machine."""
    connections = psutil.Process(pid).net_connections("inet")
    return {
        c.laddr.port
        for c in connections
        if c.status == psutil.CONN_LISTEN and c.laddr.ip in ("0.0.0.0", "::")
    }


def read_logs(directory: str) -> str:
    """Return everything that a Ray has logged."""
    files = Path(directory).rglob("*")
    return "".join(
        f.read_text(errors="replace")
        for f in files
        if f.is_file() and f.suffix in (".log", ".out", ".err")
    )


# ---- actors that open engines ----


class Host:
    """An actor that opens an engine, asks it and closes it."""

    def answer(self, model: Path, backend: str, tp: int) -> tuple[Any, ...]:
        """Return the tokens, the backend, the start method and the threads of every rank."""
        with Engine(model, tp=tp, backend=backend, device="cpu") as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            num_threads = llm.collective_rpc(_num_torch_threads)
            tokens = tuple(output.token_ids for output in outputs)
            return tokens, llm.backend.name, llm.start_method.name, num_threads


def _num_torch_threads(_worker: object) -> int:
    import torch

    return torch.get_num_threads()


class FakeHost:
    """An actor that opens a group of fake workers and may end without closing it."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def open(self, backend: str = "mp", in_a_cycle: bool = False) -> list[int]:
        """Open; return the pids of this actor and of the ranks, and their actors'."""
        group = new_ray_group(2) if backend == "ray" else new_group(num_ranks=2)
        group.start()
        self.kept = [group]
        pids = [os.getpid(), *(worker.pid for worker in group.workers)]
        if backend == "ray":
            pids += [actor_pid_of(worker.pid) for worker in group.workers]
        if in_a_cycle:
            group.me = group  # type: ignore[attr-defined]
            self.kept = []
        return pids

    def leave(self) -> None:
        """End this actor as an actor does that has done its work."""
        import ray

        ray.actor.exit_actor()


def host_class() -> Any:
    """Return Host as Ray wants it."""
    import ray

    return ray.remote(Host)


def fake_host_class() -> Any:
    """Return FakeHost as Ray wants it."""
    import ray

    return ray.remote(FakeHost)


class Completer:
    """What `map_batches` makes one of in every actor of its pool."""

    def __init__(self, model: Path) -> None:
        self.llm = Engine(model, device="cpu").open()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self.llm.generate(list(batch["prompt"]), GREEDY)
        return {"text": [output.text for output in outputs]}


# ---- clusters of several nodes ----


class Nodes:
    """The nodes that a driver has started, by address."""

    cluster: Any = None
    by_address: dict[str, Any] = {}  # noqa: RUF012 - one per driver process


def start_two_nodes(head: str, other: str) -> None:
    """Start two nodes with four CPUs each, and join the first."""
    import ray
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 4, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster()
    for address, name in ((head, "head"), (other, "other")):
        Nodes.by_address[address] = cluster.add_node(
            node_ip_address=address, resources={name: 1}, **common
        )
    ray.init(cluster.address, _node_ip_address=head, log_to_driver=False)
    cluster.wait_for_nodes()
    Nodes.cluster = cluster


def remove_node(address: str) -> None:
    """Take a node away as a crash would."""
    Nodes.cluster.remove_node(Nodes.by_address[address], allow_graceful=False)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


KEPT: list[Any] = []
"""What a scenario leaves open on purpose."""


def init_ray(options: dict[str, Any]) -> None:
    """Start a Ray in this driver."""
    import ray

    ray.init(**options)
