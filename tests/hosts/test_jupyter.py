"""Engines in a notebook, in a real kernel: cells, Interrupt, Restart, and where output goes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.workplace import BEGINNING, OPEN_AND_USE, Workplace
from tests.support.kernel import Kernel, open_kernel
from tests.support.leaks import wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("jupyter_loop")]

LONG = "SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)"


@pytest.fixture(scope="module")
def shared_kernel(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, jupyter_loop: None
) -> Iterator[Kernel]:
    workplace = Workplace(tmp_path_factory.mktemp("kernel"), tiny_model, [])
    with open_kernel(workplace.directory, workplace.environ) as kernel:
        assert kernel.run(BEGINNING).status == "ok"
        yield kernel


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    """The kernel that most tests share; what the last test opened is closed again."""
    assert shared_kernel.run("BEFORE = things_of_this_process()").status == "ok"
    yield shared_kernel
    cell = shared_kernel.run(
        "import gc\n"
        "for thing in [t for t in gc.get_objects() if type(t) is Engine]:\n"
        "    thing.close()\n"
        "facts = {}\n"
        "finish(facts)\n"
        "print(facts['left'])"
    )
    assert (cell.stdout, cell.stderr) == ("[]\n", "")


def pids_of(kernel: Kernel) -> list[int]:
    return [int(pid) for pid in kernel.run("print(*[w.pid for w in llm.workers])").stdout.split()]


def test_a_notebook_typed_cell_by_cell(workplace: Workplace) -> None:
    with open_kernel(workplace.directory, workplace.environ) as kernel:
        for cell in (
            BEGINNING,
            "llm = Engine(MODEL, tp=2).open()",
            "def describe(worker):\n    return [worker.rank, TYPED_HERE]",
            "facts = use(llm, describe)",
            "llm.close()",
            "finish(facts)",
            "%run program.py",
        ):
            done = kernel.run(cell)
            assert done.status == "ok", done
    workplace.assert_worked("fork", "This is a Jupyter kernel", times=2)


def test_a_notebook_executed_by_nbclient(workplace: Workplace) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = [BEGINNING, OPEN_AND_USE]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = NotebookClient(notebook, resources={"metadata": {"path": str(workplace.directory)}})
    client.execute(env=workplace.environ)
    workplace.assert_worked("fork", "This is a Jupyter kernel")


@pytest.mark.parametrize(
    "call",
    [
        f"while True: llm.generate(['a'] * 16, {LONG})",
        "for _ in llm.stream('a', " + LONG + "): time.sleep(0.1)",
        "llm.collective_rpc(lambda worker: __import__('time').sleep(5))",
    ],
    ids=["generate", "stream", "collective_rpc"],
)
def test_interrupt_ends_the_cell_and_not_the_engine(call: str, kernel: Kernel) -> None:
    kernel.run("llm = Engine(MODEL, tp=2).open()")
    cell_id = kernel.start(f"print('started')\n{call}")
    kernel.wait_for_text(cell_id, "started")
    kernel.interrupt()
    cell = kernel.wait_for(cell_id, seconds=10)
    assert cell.error == "KeyboardInterrupt"
    assert cell.seconds < 3.0
    after = kernel.run("use(llm, lambda worker: worker.rank)['returned']")
    assert after.values == ["[0, 1]"]


def test_interrupt_while_it_opens_leaves_nothing(kernel: Kernel) -> None:
    cell_id = kernel.start("print('started')\nllm = Engine(MODEL, tp=2, progress=True).open()")
    kernel.wait_for_text(cell_id, "llmrt: ")
    kernel.interrupt()
    assert kernel.wait_for(cell_id, seconds=10).error == "KeyboardInterrupt"
    again = kernel.run("with Engine(MODEL, tp=2) as llm: print(len(llm.workers))")
    assert again.stdout == "2\n"


def test_a_cell_that_fails_inside_with_leaves_nothing(kernel: Kernel) -> None:
    cell = kernel.run(
        "with Engine(MODEL, tp=2) as llm:\n"
        "    print(*[w.pid for w in llm.workers])\n"
        "    raise LookupError"
    )
    assert cell.error == "LookupError"
    wait_until_gone([int(pid) for pid in cell.stdout.split()], 0.5)
    assert kernel.run("print(llm.state.value)").stdout == "closed\n"


def test_two_engines_over_several_cells(kernel: Kernel) -> None:
    kernel.run("one = Engine(MODEL, tp=2).open()")
    kernel.run("two = Engine(MODEL).open()")
    assert kernel.run("len(one.generate('a') + two.generate('a'))").values == ["2"]
    kernel.run("one.close()")
    cell = kernel.run("len(two.generate('a')), one.state.value")
    assert cell.values == ["(1, 'closed')"]
    kernel.run("two.close()")


def test_an_engine_is_made_again_in_the_same_name(kernel: Kernel) -> None:
    pids: list[int] = []
    for _ in range(10):
        assert kernel.run("llm = Engine(MODEL).open()").status == "ok"
        pids += pids_of(kernel)
    wait_until_gone(pids[:-1], 5.0)
    assert len(set(pids)) == 10
    kernel.run("llm.close()")


def test_what_a_worker_prints_lands_in_the_cell_that_caused_it(kernel: Kernel) -> None:
    kernel.run("llm = Engine(MODEL, tp=2).open()")
    for number in range(5):
        cell = kernel.run(f"llm.collective_rpc(lambda worker: print('said', {number}))")
        lines = [f"[llmrt rank {rank}] said {number}" for rank in (0, 1)]
        assert sorted(cell.stderr.splitlines()) == lines


def test_what_a_worker_prints_later_lands_in_the_cell_that_caused_it(kernel: Kernel) -> None:
    kernel.run("llm = Engine(MODEL).open()")
    kernel.run(
        "def wait_and_print(worker, path):\n"
        "    while not os.path.exists(path): pass\n"
        "    print('said late', flush=True)"
    )
    started = kernel.start(
        "import threading, contextvars\n"
        "call = lambda: llm.collective_rpc(wait_and_print, 'flag')\n"
        "thread = threading.Thread(target=contextvars.copy_context().run, args=(call,))\n"
        "thread.start()"
    )
    kernel.wait_for(started)
    later = kernel.run("open('flag', 'w').close(); thread.join()")
    kernel.wait_for_text(started, "[llmrt rank 0] said late")
    assert later.stderr == ""


def test_progress_shows_in_the_cell_and_goes_away(kernel: Kernel) -> None:
    cell = kernel.run("llm = Engine(MODEL, tp=2).open()")
    assert "llmrt: " in cell.stderr
    assert kernel.run("llm.close()").stderr == ""


def test_a_kernel_with_a_patched_loop(kernel: Kernel) -> None:
    kernel.run("llm = Engine(MODEL, tp=2).open()")
    kernel.run("import asyncio, nest_asyncio2 as patcher")
    cell = kernel.run("patcher.apply()\nlen(llm.generate('a')), len(list(llm.stream('a'))) > 0")
    assert cell.values == ["(1, True)"]
    awaited = kernel.run(
        "from llmrt import AsyncEngine\n"
        "async with AsyncEngine(MODEL, tp=2) as other:\n"
        "    print(len(await other.generate('a')))"
    )
    assert awaited.stdout == "1\n"


def test_restart_and_the_kernels_death_leave_no_worker(tiny_model: Path, tmp_path: Path) -> None:
    workplace = Workplace(tmp_path, tiny_model, [])
    with open_kernel(workplace.directory, workplace.environ) as kernel:
        opened = f"{BEGINNING}\nllm = Engine(MODEL, tp=2).open()"
        assert kernel.run(opened).status == "ok"
        pids = pids_of(kernel)
        kernel.restart()
        wait_until_gone(pids, 5.0)
        assert kernel.run(opened).status == "ok"
        pids = pids_of(kernel)
        os.kill(kernel.pid, signal.SIGKILL)
        wait_until_gone(pids, 5.0)
