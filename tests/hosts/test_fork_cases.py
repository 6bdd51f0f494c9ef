"""Forks of processes that are hard to fork: threads, pools, loops, drivers, memory, garbage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.hosts.workplace import BEGINNING, OPEN_AND_USE, Workplace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run_at_prompt(workplace: Workplace, before: str, after: str = "") -> str:
    """Run a program where auto means fork; return what it wrote to stderr."""
    beginning = BEGINNING.replace("BEFORE = things", f"{before}\n\nBEFORE = things")
    workplace.write("program.py", beginning + OPEN_AND_USE + after)
    return workplace.run("-i", "program.py").stderr


# ---- threads and pools ----

TORCH_POOL = """
import torch
torch.set_num_threads(4)
def compute():
    ones = torch.ones(400, 400)
    return torch.ones(1 << 16).exp().sum().item(), (ones @ ones).sum().item()
expected = compute()
assert len(os.listdir("/proc/self/task")) > 1
"""


def test_after_large_tensor_operations(workplace: Workplace) -> None:
    run_at_prompt(workplace, TORCH_POOL, "assert compute() == expected\n")
    workplace.assert_worked("fork", "This is python -i")


def test_after_importing_transformers(workplace: Workplace) -> None:
    run_at_prompt(workplace, "import transformers; transformers.AutoTokenizer")
    workplace.assert_worked("fork", "This is python -i")


TOKENIZERS = """
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(MODEL + "/tokenizer.json")
expected = [e.ids for e in tokenizer.encode_batch(["some text"] * 1000)]
assert len(os.listdir("/proc/self/task")) > 1
"""
STILL = 'assert [e.ids for e in tokenizer.encode_batch(["some text"] * 1000)] == expected\n'


def test_after_tokenizing_in_parallel(workplace: Workplace) -> None:
    run_at_prompt(workplace, TOKENIZERS, STILL)
    workplace.assert_worked("fork", "This is python -i")


def test_our_own_tokenizing_makes_no_fork_warn(workplace: Workplace) -> None:
    said = run_at_prompt(workplace, "", OPEN_AND_USE)
    workplace.assert_worked("fork", "This is python -i", times=2)
    assert said.replace(">", "").strip() == ""


BUSY_THREADS = """
import threading
done = threading.Event()
def spin():
    while not done.is_set():
        sum(range(1000))
threads = [threading.Thread(target=spin) for _ in range(20)]
for thread in threads: thread.start()
"""


def test_beside_twenty_busy_threads(workplace: Workplace) -> None:
    run_at_prompt(workplace, BUSY_THREADS, "done.set()\n")
    workplace.assert_worked("fork", "This is python -i")


OPENS_BESIDE_TORCH = """
import json, sys, threading
import torch
from collections import Counter
from llmrt.runtime.fork_history import ForkHistory
from llmrt.runtime.launchers.mp import MpLauncher
from tests.runtime.conftest import new_group
from tests.support.fake_workers import Echo

done = threading.Event()
torch.set_num_threads(2)
def compute():
    a = torch.ones(300, 300)
    while not done.is_set():
        a = (a @ a).exp().clamp(max=1.0)
computing = threading.Thread(target=compute)
computing.start()
methods = Counter()

def open_and_close(number):
    # Each with a history of its own: otherwise the first fall-back is the last fork.
    group = new_group(method="fork", launcher=MpLauncher(ForkHistory()))
    group.start()
    assert group.call(Echo(value=number), 20) == [number] * 2
    methods[group.start_method.name] += 1
    assert [w.ended_by for w in group.close().workers] == ["asked"] * 2

try:
    for number in range(int(sys.argv[1])):
        open_and_close(number)
finally:
    done.set()
    computing.join()
print(json.dumps(methods))
"""


@pytest.mark.timeout(600)
def test_no_open_hangs_beside_a_thread_that_runs_torch(workplace: Workplace) -> None:
    num_opens = int(os.environ.get("LLMRT_TEST_NUM_OPENS", "20"))
    workplace.write("program.py", OPENS_BESIDE_TORCH)
    done = workplace.run(
        "program.py", str(num_opens), environ={"PYTHONPATH": str(ROOT)}, seconds=90 + num_opens
    )
    methods = json.loads(done.stdout)
    print(f"started by: {methods}")
    assert sum(methods.values()) == num_opens
    assert methods["fork"] > num_opens / 2


# ---- where a fork is refused ----

DRIVER = """
from llmrt.runtime import observe
device = os.path.abspath("nvidia0")
observe.ACCELERATOR_FILES += (device,)
driver = open(device, "w")
"""
REFUSED = """
try:
    Engine(MODEL, tp=2, start_method="fork").open()
except ValueError as error:
    assert f"an accelerator driver is open in this process ({device})" in str(error), error
else:
    raise AssertionError("forked beside an open driver")
"""


def test_with_a_driver_open(workplace: Workplace) -> None:
    run_at_prompt(workplace, DRIVER, REFUSED)
    workplace.assert_worked("spawn", "An accelerator driver is open in this process (/")


def test_with_two_gibibytes_allocated(workplace: Workplace) -> None:
    run_at_prompt(workplace, "memory = bytearray(b'x') * (2 << 30)")
    workplace.assert_worked("spawn", "holds 2.0 GiB of anonymous memory")


# ---- what the user holds ----

GARBAGE = """
import gc, socket, tempfile
class Cycle:
    def __init__(self):
        self.itself = self
        self.directory = tempfile.TemporaryDirectory(dir=".")
        self.pair = socket.socketpair()
        self.file = open("buffered", "w")
        self.file.write("text")
gc.disable()
cycle = Cycle()
directory, peer = cycle.directory.name, cycle.pair[1].dup()
peer.setblocking(False)
del cycle
"""
UNTOUCHED = """
assert os.path.isdir(directory)
assert os.path.getsize("buffered") == 0
try:
    raise AssertionError(f"the other end was closed: {peer.recv(1)!r}")
except BlockingIOError:
    pass
import warnings
warnings.simplefilter("ignore")
gc.collect()
assert not os.path.exists(directory)
assert open("buffered").read() == "text"
assert peer.recv(1) == b""
"""


def test_garbage_is_finalised_in_the_users_process_alone(workplace: Workplace) -> None:
    run_at_prompt(workplace, GARBAGE, UNTOUCHED)
    workplace.assert_worked("fork", "This is python -i")


RUNNING_LOOP = """
import asyncio

async def echo(reader, writer):
    while data := await reader.read(1):
        writer.write(data)
    writer.close()

async def play(port, played):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(b"x")
        played.append(await reader.readexactly(1))

async def plays_on(played):
    num = len(played)
    for _ in range(1000):
        if len(played) > num + 3:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the loop's own connections came to a stop")

async def main():
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    played = []
    playing = asyncio.ensure_future(play(server.sockets[0].getsockname()[1], played))
    await plays_on(played)
    global BEFORE
    BEFORE = things_of_this_process()
    with Engine(MODEL, tp=2, progress=False) as llm:
        await plays_on(played)
        facts = use(llm, lambda worker: [worker.rank, TYPED_HERE])
        await plays_on(played)
    await plays_on(played)
    finish(facts)
    playing.cancel()
    server.close()

asyncio.run(main())
"""


def test_a_running_event_loop_goes_on(workplace: Workplace) -> None:
    workplace.write("program.py", BEGINNING + RUNNING_LOOP)
    workplace.run("-i", "program.py")
    workplace.assert_worked("fork", "This is python -i")
