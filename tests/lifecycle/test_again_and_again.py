"""Engines opened and closed many times, and many at once: all stays flat, nothing clashes."""

from __future__ import annotations

import gc
import os
import subprocess
import time
import weakref
from pathlib import Path

import psutil
import pytest
import torch

from llmrt import Engine, EngineStartError
from tests.lifecycle.conftest import SHORT, MakeEngine, StartProgram, pids_of
from tests.support.program import Program

pytestmark = pytest.mark.slow

CYCLES = """
import gc, tempfile
from tests.support.rigged import Rigged
{imports}

def resources():
    gc.collect()
    tasks = len(os.listdir("/proc/self/task"))
    shm = sorted(os.listdir("/dev/shm"))
    temporary = sorted(n for n in os.listdir(tempfile.gettempdir()) if "llmrt" in n)
    descriptors = sorted(os.listdir("/proc/self/fd"))
    return [tasks, descriptors, shm, temporary]

def rss_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

for cycle in range({num_cycles}):
    with Engine(MODEL, tp=1 + cycle % 2, {options}) as llm:
        assert len(llm.generate("a", SHORT)[0].token_ids) == 4
        if cycle % 5 == 0:
            next(llm.stream("a", LONG))
    if cycle == 2:
        before, rss_before = resources(), rss_bytes()
after = resources()
assert after == before, (before, after)
say(growth=rss_bytes() - rss_before)
"""
MEBIBYTE = 1 << 20


def run_cycles(start_program: StartProgram, **format_: object) -> Program:
    program = start_program(CYCLES.format(**format_))
    assert program.finish(900) == ""
    assert program.facts["growth"] < 5 * MEBIBYTE
    return program


def test_thirty_light_engines_leave_everything_flat(start_program: StartProgram) -> None:
    run_cycles(start_program, imports="", num_cycles=30, options="backend=Rigged()")


def test_real_engines_leave_everything_flat(start_program: StartProgram) -> None:
    run_cycles(start_program, imports="import torch", num_cycles=6, options="start_method='fork'")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("method", "imports"), [("fork", "import torch"), ("spawn", "")], ids=["fork", "spawn"]
)
def test_a_hundred_real_engines_leave_everything_flat(
    start_program: StartProgram, method: str, imports: str
) -> None:
    run_cycles(start_program, imports=imports, num_cycles=100, options=f"start_method='{method}'")


def test_few_descriptors_are_enough_for_many_engines(start_program: StartProgram) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    run_cycles(
        start_program,
        imports=limit,
        num_cycles=30,
        options="backend=Rigged(), max_num_seqs=4",
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_the_same_engine_opens_again_and_again(tiny_model: Path, tp: int) -> None:
    llm = Engine(tiny_model, tp=tp, start_method="fork")
    answers = set()
    for _ in range(20 if tp == 2 else 5):
        with llm:
            answers.add(llm.generate("a", SHORT)[0].token_ids)
    assert len(answers) == 1


def test_a_model_that_ran_in_this_process_is_freed(tiny_model: Path) -> None:
    for _ in range(2):
        with Engine(tiny_model, backend="inprocess") as llm:
            kept: list[weakref.ref[torch.nn.Module]] = []
            llm.apply_model(lambda model, kept=kept: kept.append(weakref.ref(model)))
            llm.generate("a", SHORT)
        models = [o for o in gc.get_objects() if type(o).__name__ == "Decoder"]
        assert models == []


OPENER = """
from tests.support.rigged import Rigged
{imports}
engine = Engine(MODEL, tp=2, {options})
say(ready=True)
for _ in range({rounds}):
    assert sys.stdin.readline()
    with engine as llm:
        assert llm.collective_rpc(lambda worker: worker.rank) == [0, 1]
        say(answer=list(llm.generate("a", SHORT)[0].token_ids))
"""


def open_at_once(start_program: StartProgram, num: int, rounds: int, **format_: object) -> None:
    source = OPENER.format(rounds=rounds, **format_)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}
    openers = [
        start_program(source, stdin=subprocess.PIPE, env=env if n % 2 else {}) for n in range(num)
    ]
    for opener in openers:
        opener.wait_for("ready")
    for _ in range(rounds):
        for opener in openers:
            opener.type("go")
        answers = []
        for opener in openers:
            opener.facts.clear()
            answers.append(opener.wait_for("answer"))
        assert answers == [answers[0]] * num
    for opener in openers:
        assert opener.finish() == ""
        assert opener.process.returncode == 0


def test_eight_processes_that_open_at_once_do_not_clash(start_program: StartProgram) -> None:
    open_at_once(start_program, 8, rounds=3, imports="", options="backend=Rigged()")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_processes_that_open_real_engines_at_once_do_not_clash(
    start_program: StartProgram,
) -> None:
    open_at_once(start_program, 8, rounds=10, imports="import torch", options="start_method='fork'")


def test_too_little_shared_memory_is_a_start_error_with_the_size(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llmrt.launch_plan

    monkeypatch.setattr(llmrt.launch_plan, "shared_memory_bytes", lambda tp: 1 << 60)
    llm = make_engine()
    with pytest.raises(EngineStartError, match=r"shared memory") as caught:
        llm.open()
    assert "GiB" in str(caught.value) or "bytes" in str(caught.value)
    monkeypatch.undo()
    with llm:
        assert llm.generate("a", SHORT)


def cpu_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@pytest.mark.parametrize("tp", [1, 4])
def test_an_idle_engine_uses_no_processor(tiny_model: Path, tp: int) -> None:
    with Engine(tiny_model, tp=tp, start_method="fork") as llm:
        llm.generate(["a"] * 4, SHORT)
        pids = [os.getpid(), *pids_of(llm)]
        before, started_at = cpu_seconds(pids), time.monotonic()
        time.sleep(3.0)  # what is measured is what happens while nothing happens
        used, passed = cpu_seconds(pids) - before, time.monotonic() - started_at
    assert used < 0.01 * passed + 0.011, "one tick of the kernel's clock is 10 ms"
