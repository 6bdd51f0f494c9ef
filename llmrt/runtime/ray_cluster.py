"""Everything that llmrt asks of Ray, beside creating its actors. Imports Ray only when asked.

What has no public name in Ray is asked in such a way that a Ray without it gives a poorer answer,
not an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from llmrt.errors import ConfigError
from llmrt.runtime.placement import Bundle, Node, PlacementError, held_by_bundle

OLDEST, BEFORE = (2, 44), (3, 0)
"""The versions of Ray that are supported: from the first, before the second."""
_REMOVE_SECONDS = 10.0
_WORKER_MODE = 1
_INSTALL = "pip install 'llmrt[ray]'"
_BUNDLE_SLOTS = 1000.0
"""What Ray counts as `bundle_group_N` of an empty bundle: every tenant takes a bit of it."""


def _ray() -> Any:
    return import_module("ray")


def _worker() -> Any:
    return import_module("ray._private.worker").global_worker


# ---- whether it can be used ----


def check_installation() -> None:
    """Check that the Ray here is one that llmrt can use.

    Raises:
        ConfigError: it is not there, or of another version, or only called so.
    """
    wanted = f"ray>={_dotted(OLDEST)},<{_dotted(BEFORE)}"
    before = dict(os.environ)
    try:
        ray = _ray()
    except ImportError as error:
        raise ConfigError(f'backend="ray" needs {wanted}: {_INSTALL} ({error}).') from error
    found = getattr(ray, "__version__", None)
    if found is None or find_spec("ray._raylet") is None:
        where = getattr(ray, "__file__", None) or next(iter(getattr(ray, "__path__", ["?"])))
        raise ConfigError(
            f"What Python imports as `ray` is not Ray but {where}; rename that, and {_INSTALL}."
        )
    take_back(before, dict(os.environ))  # Ray sets a variable when it is imported
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(found))[:2])
    if not OLDEST <= numbers < BEFORE:
        raise ConfigError(f'backend="ray" works with {wanted}; found {found}.')


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def check_mode(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse Ray's client mode.

    Raises:
        ConfigError: this process is, or would become, a client outside the cluster.
    """
    address = environ.get("RAY_ADDRESS", "")
    is_client = is_initialized() and _is_client()
    if is_client or (address.startswith("ray://") and not is_initialized()):
        raise ConfigError(
            f"This process is a Ray client{f' ({address})' if address else ''}, outside the "
            "cluster, where workers cannot call in. Open the engine in a driver on a node of the "
            'cluster (ray.init("auto") there, or a job submitted with `ray job submit`), or in an '
            "actor."
        )


def _is_client() -> bool:
    return bool(import_module("ray.util.client").ray.is_connected())


def is_initialized() -> bool:
    """Return whether this process takes part in a cluster."""
    return bool(_ray().is_initialized())


def start() -> None:
    """Join the cluster that the environment names or this machine belongs to, or start one."""
    _ray().init(log_to_driver=False, configure_logging=False, include_dashboard=False)


def shut_down() -> None:
    """Leave it; end it, if it was started here."""
    _ray().shutdown()


def is_used_by_others() -> bool:
    """Return whether an actor or a group lives here; also where that cannot be told."""
    try:
        groups = import_module("ray.util").placement_group_table().values()
        actors = import_module("ray._private.state").actors().values()
    except Exception:
        return True
    return any(group["state"] != "REMOVED" for group in groups) or any(
        actor["State"] != "DEAD" for actor in actors
    )


def take_back(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Undo the changes of the environment from one state to another, but for later changes."""
    for name in before.keys() | after.keys():
        was, became = before.get(name), after.get(name)
        if was == became or os.environ.get(name) != became:
            continue
        if was is None:
            del os.environ[name]
        else:
            os.environ[name] = was


# ---- nodes ----


def own_node_id() -> str:
    """Return the id of the node that this process is on."""
    return str(_ray().get_runtime_context().get_node_id())


def own_address() -> str:
    """Return the address of this node, as Ray knows it."""
    return str(import_module("ray.util").get_node_ip_address())


def nodes() -> list[Node]:
    """Return what the living nodes have."""
    available: dict[str, dict[str, float]] = {}
    with contextlib.suppress(Exception):
        available = import_module("ray._private.state").available_resources_per_node()
    return [
        Node(
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
        )
        for node in _ray().nodes()
        if node["Alive"]
    ]


def num_in_cluster(resource: str) -> float:
    """Return how much of a resource the cluster has, used or not."""
    return float(_ray().cluster_resources().get(resource, 0.0))


def is_worker() -> bool:
    """Return whether Ray started this process, for a task or an actor."""
    return _worker().mode == _WORKER_MODE


def num_assigned(resource: str) -> float:
    """Return how much of a resource Ray gave this process; a driver was given none."""
    if not is_worker():
        return 0.0
    return float(_ray().get_runtime_context().get_assigned_resources().get(resource, 0.0))


def is_set_by_runtime_env(name: str) -> bool:
    """Return whether the user's runtime_env sets an environment variable for this process."""
    variables: dict[str, str] | None = _ray().get_runtime_context().runtime_env.get("env_vars")
    return name in (variables or {})


# ---- placement groups ----


def current_group() -> Any | None:
    """Return the placement group that this process runs in; for the thread that was started in it.

    Asked only where Ray is initialised.
    """
    return import_module("ray.util").get_current_placement_group() if is_initialized() else None


def create_group(bundles: list[dict[str, float]], name: str) -> Any:
    """Ask for a group; it comes to be later."""
    return import_module("ray.util").placement_group(bundles, strategy="PACK", name=name)


def is_ready(group: Any, seconds: float) -> bool:
    """Wait for a group to be placed; return whether it is.

    Raises:
        PlacementError: it was removed.
    """
    if state_of(group) == "REMOVED":
        raise PlacementError(f"the placement group {group.id.hex()} was removed.")
    return bool(group.wait(seconds))


def state_of(group: Any) -> str:
    """Return the state of a group: PENDING, CREATED, RESCHEDULING, REMOVED, or UNKNOWN."""
    return str(_table(group).get("state", "UNKNOWN"))


def _table(group: Any) -> dict[str, Any]:
    return import_module("ray.util").placement_group_table(group) or {}


def remove_group(group: Any) -> None:
    """Remove a group and wait until the cluster says that it is gone."""
    import_module("ray.util").remove_placement_group(group)
    deadline = time.monotonic() + _REMOVE_SECONDS
    while state_of(group) not in ("REMOVED", "UNKNOWN") and time.monotonic() < deadline:
        time.sleep(0.005)


def bundles_of(group: Any) -> list[Bundle]:
    """Return the bundles of a placed group, with what of each an engine may use."""
    table = _table(group)
    node_ids: dict[int, str] = table["bundles_to_node_id"]
    held, tenants = _held_in(group), _tenants(group)
    bundles: list[Bundle] = []
    for index, resources in table["bundles"].items():
        own = held.get(index, {})
        bundles.append(
            Bundle(
                index=index,
                node_id=node_ids[index],
                num_cpus=max(0.0, resources.get("CPU", 0.0) - own.get("CPU", 0.0)),
                num_gpus=max(0.0, resources.get("GPU", 0.0) - own.get("GPU", 0.0)),
                is_callers=bool(own),
                is_busy=index in tenants,
            )
        )
    return bundles


def _held_in(group: Any) -> dict[int, dict[str, float]]:
    """Return what this process holds of the group, by bundle."""
    try:
        resource_ids = _worker().core_worker.resource_ids()
    except Exception:  # it is Ray's own business, and may go
        return {}
    return held_by_bundle(resource_ids, group.id.hex())


def _tenants(group: Any) -> set[int]:
    """Return the indices of bundles that somebody was seen in."""
    pattern = re.compile(rf"bundle_group_(\d+)_{group.id.hex()}$")
    found = ((pattern.match(k), v) for k, v in _ray().available_resources().items())
    return {int(match[1]) for match, free in found if match is not None and free < _BUNDLE_SLOTS}
