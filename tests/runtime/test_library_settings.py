"""What spawned workers find in their environment beside the user's own variables."""

from __future__ import annotations

import pytest

from llmrt.runtime.library_settings import library_settings


def test_waiting_threads_keep_their_cores() -> None:
    assert 0 < int(library_settings({})["GOMP_SPINCOUNT"]) < 10_000


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_user_who_chose_a_wait_policy_gets_another(name: str) -> None:
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & library_settings({name: "1"}).keys()


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"])
def test_a_user_who_set_up_the_allocator_gets_another(name: str) -> None:
    assert name in library_settings({})
    assert name not in library_settings({name: "1"})


def test_huge_pages_are_asked_for_beside_the_users_tunables() -> None:
    mine = "glibc.malloc.check=3"
    assert library_settings({})["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    both = library_settings({"GLIBC_TUNABLES": mine})["GLIBC_TUNABLES"]
    assert both == f"{mine}:glibc.malloc.hugetlb=1"
    assert "GLIBC_TUNABLES" not in library_settings({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"})
