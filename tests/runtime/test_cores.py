"""Cores and memory under affinity and made-up cgroups of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmrt.errors import ConfigError
from llmrt.runtime.cores import (
    available_cores,
    available_memory_bytes,
    cgroup_version,
    threads_per_rank,
)

GIB = 1 << 30
MEMINFO = f"MemTotal: {32 << 20} kB\nMemFree: 1 kB\nMemAvailable: {20 << 20} kB\n"
V1_UNLIMITED = 9223372036854771712


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


# ---- cores ----


def test_cores_follow_the_affinity_of_this_process() -> None:
    code = (
        "import os\nfrom llmrt.runtime.cores import available_cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print(available_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "1"


def test_cores_without_cgroups_are_the_affinity(many_cores: None, tmp_path: Path) -> None:
    assert available_cores(tmp_path) == 64


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("400000 100000", 4),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("max 100000", 64),
        ("9000000 100000", 64),
    ],
)
def test_a_quota_of_cgroup_v2_limits_the_cores(
    limit: str, cores: int, many_cores: None, tmp_path: Path
) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": limit})
    assert available_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(350000, 4), (-1, 64), (100000, 1)])
def test_a_quota_of_cgroup_v1_limits_the_cores(
    quota: int, cores: int, many_cores: None, tmp_path: Path
) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/docker/ab\n0::/",
            "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu,cpuacct/docker/ab/cpu.cfs_period_us": 100000,
        },
    )
    assert available_cores(tmp_path) == cores


def test_a_quota_of_a_parent_group_counts_too(many_cores: None, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job",
            "sys/fs/cgroup/slice/cpu.max": "300000 100000",
            "sys/fs/cgroup/slice/job/cpu.max": "max 100000",
        },
    )
    assert available_cores(tmp_path) == 3


def test_a_container_that_shows_the_hosts_path_is_limited_by_what_is_mounted(
    many_cores: None, tmp_path: Path
) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/docker-1234.scope",
            "sys/fs/cgroup/cpu.max": "200000 100000",
        },
    )
    assert available_cores(tmp_path) == 2


def test_cgroup_v2_beside_v1_has_a_folder_of_its_own(many_cores: None, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n0::/job",
            "sys/fs/cgroup/unified/job/cpu.max": "500000 100000",
        },
    )
    assert available_cores(tmp_path) == 5


# ---- threads of a rank ----


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (4, 2, 1), (64, 2, 1)]
)
def test_ranks_share_the_cores(ranks: int, cores: int, threads: int) -> None:
    assert threads_per_rank(ranks, {}, cores=cores) == threads


def test_ranks_together_run_no_more_threads_than_there_are_cores() -> None:
    for cores in range(1, 17):
        for ranks in range(1, cores + 1):
            assert (threads_per_rank(ranks, {}, cores=cores) or 0) * ranks <= cores


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_users_own_number_of_threads_is_left_alone(variable: str) -> None:
    assert threads_per_rank(2, {variable: "3"}, cores=8) is None
    assert threads_per_rank(2, {variable: " "}, cores=8) == 4


def test_cores_are_asked_of_this_machine_by_default() -> None:
    assert threads_per_rank(1, {}) == available_cores()


# ---- memory ----


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert available_memory_bytes(tmp_path) == 20 * GIB


def test_memory_is_what_cgroup_v2_leaves(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/slice/job",
            "sys/fs/cgroup/slice/memory.max": "max",
            "sys/fs/cgroup/slice/memory.current": 9 * GIB,
            "sys/fs/cgroup/slice/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/slice/job/memory.current": 5 * GIB,
            "sys/fs/cgroup/slice/job/memory.stat": f"anon 1\ninactive_file {2 * GIB}",
        },
    )
    assert available_memory_bytes(tmp_path) == 5 * GIB


def test_memory_is_what_cgroup_v1_leaves(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/docker/ab\n0::/",
            "sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes": 4 * GIB,
            "sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes": 3 * GIB,
            "sys/fs/cgroup/memory/docker/ab/memory.stat": f"total_inactive_file {GIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 10 * GIB,
        },
    )
    assert available_memory_bytes(tmp_path) == 2 * GIB


def test_a_group_over_its_limit_leaves_nothing_and_not_less(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.current": 2 * GIB,
        },
    )
    assert available_memory_bytes(tmp_path) == 0


def test_memory_that_nothing_tells_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        available_memory_bytes(tmp_path)


def test_this_machine_has_some_memory_and_cores() -> None:
    assert available_memory_bytes() > 1 << 20
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("lines", "folder", "version"),
    [
        ("4:memory:/\n0::/", "memory", 1),
        ("0::/", ".", 2),
    ],
)
def test_the_version_of_the_cgroups_is_told(
    lines: str, folder: str, version: int, tmp_path: Path
) -> None:
    write(tmp_path, {"proc/self/cgroup": lines, f"sys/fs/cgroup/{folder}/cgroup.procs": ""})
    assert cgroup_version(tmp_path) == version


def test_a_machine_without_cgroups_has_no_version(tmp_path: Path) -> None:
    assert cgroup_version(tmp_path) is None
