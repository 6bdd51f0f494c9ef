"""The decision between fork and spawn, row by row, on made-up environments."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from llmrt.errors import ConfigError
from llmrt.runtime.environment import (
    Environment,
    Host,
    choose_start_method,
    deciding_row,
    explain_start_method,
)

NOTEBOOK = Environment(
    host=Host.JUPYTER, platform="linux", machine="x86_64", anonymous_bytes=200 << 20
)
SCRIPT = replace(NOTEBOOK, host=Host.SCRIPT)
GIB = 1 << 30

UNSAFE = {
    "platform": {"platform": "darwin"},
    "ray driver": {"ray": "driver"},
    "ray worker": {"ray": "worker"},
    "nvidia": {"open_accelerators": ("/dev/nvidia0", "/dev/nvidiactl")},
    "torch": {"open_accelerators": ("torch.cuda",)},
    "unreadable": {"open_accelerators": None},
}


def unsafe_notebook(name: str) -> Environment:
    facts: dict[str, Any] = UNSAFE[name]
    return replace(NOTEBOOK, **facts)


@pytest.mark.parametrize(
    "host", [Host.JUPYTER, Host.IPYTHON, Host.IDE_WINDOW, Host.PYTHON_I, Host.REPL]
)
def test_interactive_hosts_fork(host: Host) -> None:
    method = choose_start_method(replace(NOTEBOOK, host=host))
    assert method.name == "fork"
    assert host.value in method.reason


@pytest.mark.parametrize(
    "host",
    [
        Host.SCRIPT,
        Host.MODULE,
        Host.COMMAND,
        Host.STDIN,
        Host.FROZEN,
        Host.TEST_RUNNER,
        Host.DEBUGGER,
    ],
)
def test_programs_spawn(host: Host) -> None:
    method = choose_start_method(replace(NOTEBOOK, host=host))
    assert method.name == "spawn"
    assert host.value in method.reason


def test_every_host_is_decided_by_exactly_one_row() -> None:
    for host in Host:
        rows = explain_start_method(replace(NOTEBOOK, host=host))
        assert [row.decides for row in rows].count(True) == 1


@pytest.mark.parametrize("name", UNSAFE)
def test_auto_spawns_where_a_fork_cannot_work(name: str) -> None:
    assert choose_start_method(unsafe_notebook(name)).name == "spawn"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("platform", "darwin"),
        ("ray driver", "Ray is initialised"),
        ("ray worker", "Ray worker"),
        ("nvidia", "/dev/nvidia0, /dev/nvidiactl"),
        ("torch", "torch.cuda"),
        ("unreadable", "open files of this process cannot be read"),
    ],
)
def test_fork_on_request_is_refused_with_its_cause(name: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as caught:
        choose_start_method(unsafe_notebook(name), "fork")
    assert isinstance(caught.value, ValueError)
    assert "start_method='spawn'" in str(caught.value)


@pytest.mark.parametrize("name", UNSAFE)
def test_fork_by_variable_becomes_spawn_with_a_warning_where_it_cannot_work(name: str) -> None:
    environment = replace(unsafe_notebook(name), method_variable="fork")
    row = deciding_row(explain_start_method(environment))
    assert row.number == 2
    assert row.start_method == choose_start_method(environment)
    assert row.start_method.name == "spawn"
    assert row.warning is not None
    assert row.warning.startswith("LLMRT_WORKER_MULTIPROC_METHOD=fork is set, but ")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_method_on_request_wins_over_everything_that_is_only_a_matter_of_cost(
    method: str,
) -> None:
    for host in (Host.SCRIPT, Host.JUPYTER):
        environment = replace(
            NOTEBOOK, host=host, anonymous_bytes=8 * GIB, method_variable="nonsense"
        )
        chosen = choose_start_method(environment, method, thread_option_given=True)
        assert chosen.name == method
        assert chosen.reason == f"start_method={method!r} was given."


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_method_by_variable_wins_over_cost_and_host(method: str) -> None:
    for host in (Host.SCRIPT, Host.JUPYTER):
        environment = replace(NOTEBOOK, host=host, anonymous_bytes=8 * GIB, method_variable=method)
        chosen = choose_start_method(environment)
        assert chosen.name == method
        assert chosen.reason == f"LLMRT_WORKER_MULTIPROC_METHOD={method} is set."


@pytest.mark.parametrize("value", ["forkserver", "SPAWN", "auto", " "])
def test_an_unknown_value_of_the_variable_is_an_error_that_names_it(value: str) -> None:
    with pytest.raises(ConfigError, match="LLMRT_WORKER_MULTIPROC_METHOD") as caught:
        choose_start_method(replace(NOTEBOOK, method_variable=value))
    assert repr(value) in str(caught.value)


def test_an_unknown_method_on_request_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'auto', 'fork', 'spawn'"):
        choose_start_method(NOTEBOOK, "forkserver")


def test_a_fork_that_would_keep_much_memory_allocated_is_not_chosen() -> None:
    at_limit = replace(NOTEBOOK, anonymous_bytes=GIB)
    above = replace(NOTEBOOK, anonymous_bytes=GIB + 1)
    assert choose_start_method(at_limit).name == "fork"
    assert choose_start_method(above).name == "spawn"
    assert "1.0 GiB of anonymous memory" in choose_start_method(above).reason


def test_memory_that_cannot_be_read_does_not_decide() -> None:
    assert choose_start_method(replace(NOTEBOOK, anonymous_bytes=None)).name == "fork"


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "GOMP_CPU_AFFINITY",
        "KMP_BLOCKTIME",
        "MKL_NUM_THREADS",
        "LD_PRELOAD",
        "MALLOC_ARENA_MAX",
        "PYTHONMALLOC",
    ],
)
def test_variables_that_are_read_when_libraries_load_need_a_fresh_process(name: str) -> None:
    chosen = choose_start_method(NOTEBOOK, worker_env={"HARMLESS": "1", name: "2"})
    assert chosen.name == "spawn"
    assert name in chosen.reason
    assert "HARMLESS" not in chosen.reason


def test_other_variables_do_not_keep_a_notebook_from_forking() -> None:
    assert choose_start_method(NOTEBOOK, worker_env={"HF_HOME": "/x"}).name == "fork"


def test_fork_on_request_warns_of_variables_that_come_too_late() -> None:
    rows = explain_start_method(NOTEBOOK, "fork", worker_env={"OMP_NUM_THREADS": "2"})
    row = deciding_row(rows)
    assert row.start_method is not None
    assert row.start_method.name == "fork"
    assert row.warning is not None
    assert "OMP_NUM_THREADS" in row.warning


def test_a_thread_option_needs_a_fresh_process() -> None:
    assert choose_start_method(NOTEBOOK, thread_option_given=True).name == "spawn"


@pytest.mark.parametrize(
    ("environment", "requested"),
    [
        (NOTEBOOK, "auto"),
        (NOTEBOOK, "fork"),
        (replace(NOTEBOOK, method_variable="fork"), "auto"),
    ],
    ids=["auto", "option", "variable"],
)
def test_a_process_whose_fork_failed_its_probe_forks_no_more(
    environment: Environment, requested: str
) -> None:
    why = "rank 1 ran no parallel region within 5 s."
    chosen = choose_start_method(environment, requested, fork_failed_reason=why)
    assert chosen.name == "spawn"
    assert "(rank 1 ran no parallel region within 5 s)" in chosen.reason


def test_rows_win_in_order() -> None:
    """Of every set of rows that hold, the first decides."""
    facts: dict[int, dict[str, Any]] = {
        2: {"method_variable": "spawn"},
        3: {"platform": "freebsd14"},
        4: {"ray": "driver"},
        5: {"open_accelerators": ("/dev/kfd",)},
        6: {"anonymous_bytes": 2 * GIB},
    }
    for holds in product([False, True], repeat=len(facts) + 1):
        numbers = [n for n, there in zip((1, *facts), holds, strict=True) if there]
        changes = {k: v for n in numbers if n in facts for k, v in facts[n].items()}
        requested = "spawn" if 1 in numbers else "auto"
        rows = explain_start_method(replace(NOTEBOOK, **changes), requested)
        assert [row.number for row in rows if row.matches] == [*numbers, 7]
        assert deciding_row(rows).number == min([*numbers, 7])


def test_every_reason_is_one_sentence() -> None:
    environments = [NOTEBOOK, SCRIPT, *map(unsafe_notebook, UNSAFE)]
    environments += [replace(NOTEBOOK, anonymous_bytes=2 * GIB)]
    environments += [replace(e, method_variable="fork") for e in environments]
    methods = [choose_start_method(e) for e in environments]
    methods += [choose_start_method(NOTEBOOK, name) for name in ("fork", "spawn")]
    methods += [choose_start_method(NOTEBOOK, thread_option_given=True)]
    methods += [choose_start_method(NOTEBOOK, worker_env={"LD_PRELOAD": "x", "OMP_X": "1"})]
    for method in methods:
        assert method.reason.endswith(".")
        assert ". " not in method.reason
        assert not method.reason[0].islower() or method.reason.startswith("start_method=")


def test_the_explanation_says_what_each_row_saw() -> None:
    environment = replace(
        NOTEBOOK, open_accelerators=("/dev/nvidia0",), anonymous_bytes=3 * GIB, ray="driver"
    )
    saw = {r.number: r.saw for r in explain_start_method(environment, worker_env={"OMP_X": "1"})}
    assert saw == {
        1: "start_method='auto'",
        2: "not set",
        3: "linux on x86_64",
        4: "a Ray driver",
        5: "/dev/nvidia0",
        6: "3.0 GiB of anonymous memory; env= names OMP_X",
        7: "a Jupyter kernel",
        8: "a Jupyter kernel",
    }


def test_the_explanation_of_an_error_is_a_row_and_not_an_exception() -> None:
    row = deciding_row(explain_start_method(replace(NOTEBOOK, method_variable="bogus")))
    assert row.number == 2
    assert row.error is not None
    assert "'bogus'" in row.error
