"""Which bundles of a Ray placement group the ranks of an engine take, and in which order.

Values and pure decisions; `llmrt.runtime.ray_cluster` is what asks Ray.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class PlacementError(Exception):
    """Ray cannot place the workers; the message says what was asked and what there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRequest:
    """How the workers of an engine are to be placed."""

    group: Any | None
    """The placement group to use, which stays its owner's; None makes one."""
    device: str = "auto"
    num_cpus: float = 1.0
    """Of every rank, in a group of our own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """One bundle of a placement group, as far as an engine may use it."""

    index: int
    node_id: str
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    is_callers: bool = False
    """Whether the process that opens the engine sits in it."""
    is_busy: bool = False
    """Whether somebody else was seen in it; what Ray says of that may be a moment old."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What one node of a cluster has."""

    address: str
    total: Mapping[str, float] = field(default_factory=dict[str, float])
    available: Mapping[str, float] = field(default_factory=dict[str, float])


def wants_gpu(device: str, num_ranks: int, num_gpus: float) -> bool:
    """Return whether ranks are placed on GPUs, where `num_gpus` of them are to be had."""
    return device == "cuda" or (device == "auto" and num_gpus >= num_ranks)


def fitting(bundles: Sequence[Bundle], *, needs_gpu: bool) -> list[Bundle]:
    """Return the bundles that can hold a rank. On CPUs that is any: cores are shared if need be."""
    return [bundle for bundle in bundles if not needs_gpu or bundle.num_gpus > 0]


def choose_bundles(
    bundles: Sequence[Bundle], num_ranks: int, own_node: str, *, needs_gpu: bool
) -> tuple[Bundle, ...]:
    """Return a bundle for every rank.

    The caller's own bundle comes last, one that somebody is in before it. Among the rest as few
    nodes as possible are used, this one first.

    Raises:
        PlacementError: there are fewer bundles that fit than ranks.
    """
    fit = fitting(bundles, needs_gpu=needs_gpu)
    if len(fit) < num_ranks:
        what = "with a GPU" if needs_gpu else "in all"
        raise PlacementError(
            f"asked for tp={num_ranks} workers, one bundle each; the placement group has "
            f"{len(bundles)} bundles, {len(fit)} {what}."
        )
    candidates: list[Bundle] = []
    for tier in range(3):
        candidates += [b for b in fit if b.is_busy + 2 * b.is_callers in _TIERS[tier]]
        if len(candidates) >= num_ranks:
            break
    return tuple(_by_node(candidates, num_ranks, own_node)[:num_ranks])


_TIERS = ((0,), (1,), (2, 3))
"""Free bundles, then busy ones, then the caller's."""


def held_by_bundle(
    resource_ids: Mapping[str, Sequence[tuple[int, float]]], group_id: str
) -> dict[int, dict[str, float]]:
    """Return what a process holds of each bundle of a group that it sits in.

    Who asked for no bundle in particular, as a replica of Ray Serve does, may be given the CPU of
    one bundle and the place (`bundle`) of another: it sits where its CPU is.

    Args:
        resource_ids: what Ray has given it, such as `CPU_group_0_<group>`: shares of instances.
        group_id: the group, in hexadecimal.
    """
    pattern = re.compile(rf"(\w+)_group_(\d+)_{group_id}$")
    held: dict[int, dict[str, float]] = {}
    for name, shares in resource_ids.items():
        if (found := pattern.match(name)) is not None:
            amounts = held.setdefault(int(found[2]), {})
            amounts[found[1]] = sum(amount for _, amount in shares)
    seats = {index: amounts for index, amounts in held.items() if amounts.keys() != {"bundle"}}
    return seats or held


def _by_node(bundles: Sequence[Bundle], num_ranks: int, own_node: str) -> list[Bundle]:
    room = Counter(bundle.node_id for bundle in bundles)

    def preference(bundle: Bundle) -> tuple[bool, bool, int, str, int]:
        num = room[bundle.node_id]
        is_own = bundle.node_id == own_node
        return (num < num_ranks, not is_own, -num, bundle.node_id, bundle.index)

    return sorted(bundles, key=preference)


def rank_order(node_ids: Sequence[str], own_node: str) -> list[int]:
    """Return in which order placed workers become ranks: this node's first, then node by node."""
    first_seen: dict[str, int] = {}
    for position, node_id in enumerate(node_ids):
        first_seen.setdefault(node_id, position)
    return sorted(
        range(len(node_ids)),
        key=lambda i: (node_ids[i] != own_node, first_seen[node_ids[i]], i),
    )


def describe_shortage(
    num_ranks: int, bundle: Mapping[str, float], nodes: Sequence[Node], seconds: float
) -> str:
    """Say what was asked of a cluster and what each of its nodes has."""
    asked = _amounts(bundle, bundle)
    lines = [
        f"  node {node.address}: {_amounts(bundle, node.available)} available of "
        f"{_amounts(bundle, node.total)}"
        for node in nodes
    ]
    return (
        f"Ray could not place {num_ranks} workers of {asked} each within {seconds:g} s. "
        "The cluster has:\n" + "\n".join(lines or ["  no node that is alive"])
    )


def _amounts(names: Mapping[str, float], amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amounts.get(name, 0.0):g} {name}" for name in names)
