"""Which bundles ranks take, and in which order: pure decisions."""

from __future__ import annotations

import pytest

from llmrt.runtime.placement import (
    Bundle,
    Node,
    PlacementError,
    choose_bundles,
    describe_shortage,
    held_by_bundle,
    rank_order,
    wants_gpu,
)


def test_a_process_sits_where_its_cpu_is_whatever_its_place_is_called() -> None:
    held = {
        "bundle_group_1_abc": [(0, 0.001)],
        "bundle_group_abc": [(0, 0.001)],
        "CPU_group_abc": [(0, 1.0)],
        "CPU_group_2_abc": [(0, 1.0)],
        "GPU_group_2_abc": [(0, 0.5), (3, 1.0)],
        "CPU_group_0_other": [(0, 1.0)],
    }
    assert held_by_bundle(held, "abc") == {2: {"CPU": 1.0, "GPU": 1.5}}


def test_a_process_without_resources_sits_in_its_place() -> None:
    held = {"bundle_group_1_abc": [(0, 0.001)], "bundle_group_abc": [(0, 0.001)]}
    assert list(held_by_bundle(held, "abc")) == [1]


def bundles(nodes: str, **of_all: float) -> list[Bundle]:
    """Return a CPU bundle on each of these nodes, one letter each."""
    return [
        Bundle(index=i, node_id=node, num_cpus=1, **of_all)  # type: ignore[arg-type]
        for i, node in enumerate(nodes)
    ]


def chosen(candidates: list[Bundle], num_ranks: int, *, needs_gpu: bool = False) -> list[int]:
    picked = choose_bundles(candidates, num_ranks, "a", needs_gpu=needs_gpu)
    return [bundle.index for bundle in picked]


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "expected"),
    [
        ("aa", 2, [0, 1]),
        ("aaaaa", 2, [0, 1]),
        ("baba", 2, [1, 3]),
        ("abbb", 3, [1, 2, 3]),
        ("abbb", 4, [0, 1, 2, 3]),
        ("bcc", 2, [1, 2]),
        ("bcbc", 2, [0, 2]),
    ],
    ids=[
        "all",
        "more than needed",
        "this node's",
        "one node that holds all",
        "this node first",
        "the bigger of others",
        "either of equals, always the same",
    ],
)
def test_ranks_sit_on_as_few_nodes_as_possible(
    nodes: str, num_ranks: int, expected: list[int]
) -> None:
    assert chosen(bundles(nodes), num_ranks) == expected


def test_the_callers_bundle_is_used_last() -> None:
    own, busy, free = (
        Bundle(index=0, node_id="a", num_cpus=1, is_callers=True),
        Bundle(index=1, node_id="a", num_cpus=1, is_busy=True),
        Bundle(index=2, node_id="b", num_cpus=1),
    )
    assert chosen([own, busy, free], 1) == [2]
    assert chosen([own, busy, free], 2) == [1, 2]
    assert sorted(chosen([own, busy, free], 3)) == [0, 1, 2]


def test_only_bundles_with_a_gpu_hold_ranks_on_gpus() -> None:
    mixed = [*bundles("aa"), Bundle(index=2, node_id="b", num_gpus=0.5)]
    assert chosen(mixed, 1, needs_gpu=True) == [2]
    with pytest.raises(PlacementError, match=r"tp=2 .* has 3 bundles, 1 with a GPU"):
        chosen(mixed, 2, needs_gpu=True)


def test_too_few_bundles_name_both_numbers() -> None:
    with pytest.raises(PlacementError, match=r"tp=3 workers, one bundle each.* has 2 bundles"):
        chosen(bundles("aa"), 3)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("aab", [0, 1, 2]), ("bab", [1, 0, 2]), ("cbcb", [0, 2, 1, 3]), ("bca", [2, 0, 1])],
)
def test_ranks_go_node_by_node_and_this_one_comes_first(nodes: str, expected: list[int]) -> None:
    assert rank_order(nodes, "a") == expected


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [("cpu", 8, False), ("cuda", 0, True), ("auto", 2, True), ("auto", 1, False)],
)
def test_auto_means_gpus_where_there_are_enough(device: str, num_gpus: int, expected: bool) -> None:
    assert wants_gpu(device, 2, num_gpus) is expected


def test_a_shortage_says_what_every_node_has() -> None:
    node = Node(address="10.0.0.1", total={"CPU": 4, "GPU": 1}, available={"CPU": 0.5})
    text = describe_shortage(2, {"CPU": 1, "GPU": 1}, [node], 3.0)
    assert "2 workers of 1 CPU, 1 GPU each within 3 s" in text
    assert "node 10.0.0.1: 0.5 CPU, 0 GPU available of 4 CPU, 1 GPU" in text
    assert "no node that is alive" in describe_shortage(2, {"CPU": 1}, [], 3.0)
