"""What a rank finds around it: names, signals, descriptors, memory, modules, environment."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llmrt.errors import EngineStartError
from llmrt.runtime import shared_memory
from tests.runtime.conftest import MakeGroup
from tests.support.fake_workers import Ask, Echo, FakeConfig, Misbehave


def ask(group: Any, what: str, *arguments: object) -> Any:
    return group.call(Ask(what=what, arguments=arguments), 10)


def mask(*signals: int) -> int:
    return sum(1 << (signum - 1) for signum in signals)


def test_only_sigint_is_blocked_and_nothing_unusual_ignored(start_group: MakeGroup) -> None:
    old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    try:
        group = start_group()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGUSR1, old)
    for signals in ask(group, "signals"):
        assert int(signals["SigBlk"], 16) == mask(signal.SIGINT)
        ignored = int(signals["SigIgn"], 16) & mask(*signal.valid_signals())  # 32, 33: glibc's own
        assert ignored == mask(signal.SIGPIPE, signal.SIGXFSZ)


def test_starting_changes_nothing_in_the_owner(start_group: MakeGroup) -> None:
    def state() -> list[object]:
        return [
            dict(os.environ),
            [signal.getsignal(s) for s in signal.valid_signals()],
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
            os.getcwd(),
            list(sys.path),
            threading.enumerate(),
            sys.stdout,
            sys.excepthook,
        ]

    before = state()
    native_threads = set(os.listdir("/proc/self/task"))
    group = start_group()
    group.call(Echo(), 5)
    assert state() == before
    # A fork ends OpenMP's idle threads; they come back when there is work for them.
    assert set(os.listdir("/proc/self/task")) <= native_threads
    group.close()
    assert state() == before


def test_a_rank_has_its_own_descriptors_and_no_others(start_group: MakeGroup) -> None:
    with open(os.devnull) as file, socket.socket() as sock:
        os.set_inheritable(file.fileno(), True)
        sock.listen()
        os.set_inheritable(sock.fileno(), True)
        group = start_group(num_ranks=2, rendezvous=True, shared_memory_bytes=100)
        found = ask(group, "descriptors")
    kinds = [[t.split(":")[0] for t in rank.values() if t != "/dev/null"] for rank in found]
    # Its channel, and on rank 0 the rendezvous socket; stdout, stderr and stacks; the memory.
    assert [sorted(k for k in rank if k in ("socket", "pipe")) for rank in kinds] == [
        ["pipe"] * 3 + ["socket"] * 2,
        ["pipe"] * 3 + ["socket"],
    ]
    for rank in found:
        others = [t for t in rank.values() if not t.startswith(("socket", "pipe", "/dev/null"))]
        others = [t for t in others if not t.startswith("/proc/")]  # the listing itself
        assert [t for t in others if not t.startswith("/memfd:llmrt")] == []


def test_standard_input_is_empty(start_group: MakeGroup) -> None:
    group = start_group()
    assert [rank[0] for rank in ask(group, "descriptors")] == ["/dev/null"] * 2


def test_environment_variables_reach_ranks_and_not_the_owner(start_group: MakeGroup) -> None:
    group = start_group(env={"LLMRT_TEST": "1"})
    assert ask(group, "env", "LLMRT_TEST") == ["1", "1"]
    assert "LLMRT_TEST" not in os.environ


@pytest.mark.parametrize("value", [None, "7"])
def test_blas_threads_are_as_the_user_set_them(
    start_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", value)
    assert ask(start_group(), "env", "OPENBLAS_NUM_THREADS") == [value] * 2


def test_importing_numpy_first_leaves_a_thread(start_group: MakeGroup) -> None:
    without = ask(start_group(), "num_threads")  # a forked rank has run parallel regions
    group = start_group(preload=("numpy",))
    assert ask(group, "num_threads") == without
    assert not [phase for phase in group.heard.phases if phase[1] == "executing"]


def test_modules_are_found_as_in_the_owner(
    start_group: MakeGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "with 'quotes' and ümlauts"
    odd.mkdir()
    monkeypatch.syspath_prepend(str(odd))
    (path, _) = ask(start_group(), "path")
    assert path == [os.path.abspath(entry) for entry in sys.path] or path == sys.path


def test_the_users_program_is_not_run_again(make_group: MakeGroup) -> None:
    group = make_group(method="spawn")
    group.start()
    assert ask(group, "main") == [None, None]
    modules = ask(group, "modules")[0]
    assert "pytest" not in modules
    assert "multiprocessing" not in modules


def test_ranks_share_memory_beyond_the_first_page(start_group: MakeGroup) -> None:
    group = start_group(shared_memory_bytes=8192)
    (fd, size), _ = ask(group, "shared")
    assert fd >= 0
    assert size == 4096 + 8192
    call = group.submit(Ask(what="write_shared", arguments=(5000, b"hello")), ranks=[0])
    group.wait(call, 5)
    assert ask(group, "read_shared", 5000, 5) == [b"hello"] * 2


def test_without_shared_memory_ranks_have_none(start_group: MakeGroup) -> None:
    assert ask(start_group(), "shared") == [None, None]


def test_too_little_shared_memory_names_asked_and_available(make_group: MakeGroup) -> None:
    group = make_group(shared_memory_bytes=1 << 50)
    with pytest.raises(EngineStartError, match=rf"asked for {(1 << 50) + 4096} bytes, \d+ are av"):
        group.start()


def test_full_memory_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(shared_memory.SharedMemoryError, match="No space left"):
        shared_memory.create(10)


def test_the_rendezvous_socket_is_bound_to_this_host_alone(start_group: MakeGroup) -> None:
    group = start_group(rendezvous=True)
    (host, port, listens), (_, other_port, other_listens) = ask(group, "rendezvous")
    assert (host, listens, other_listens) == ("127.0.0.1", True, False)
    assert port == other_port
    with socket.create_connection((host, port), timeout=2):
        pass


def test_engines_started_at_once_meet_at_different_places(make_group: MakeGroup) -> None:
    groups = [make_group(rendezvous=True) for _ in range(3)]
    threads = [threading.Thread(target=group.start) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({ask(group, "rendezvous")[0][1] for group in groups}) == 3


def test_a_guard_with_threads_executes_its_ranks_instead(start_group: MakeGroup) -> None:
    group = start_group(
        preload=("tests.support.threaded_import", "tests.support.fake_workers"),
        rendezvous=True,
        shared_memory_bytes=100,
        env={"LLMRT_TEST": "1"},
    )
    told = [detail for _, phase, detail in group.heard.phases if phase == "executing"]
    assert told == ["not forked: the guard has 2 native threads after its imports"] * 2
    assert ask(group, "name") == ["llmrt-rank0", "llmrt-rank1"]
    assert ask(group, "num_threads") == [1, 1]
    assert ask(group, "env", "LLMRT_TEST") == ["1", "1"]
    assert ask(group, "shared")[0][1] == 4096 + 100
    assert [listens for _, _, listens in ask(group, "rendezvous")] == [True, False]
    assert [len(set(rank.values())) for rank in ask(group, "descriptors")] == [7, 6]
    group.call(Misbehave(fault="print", argument=1), 5)
    assert [w.ended_by for w in group.close().workers] == ["asked", "asked"]
    assert group.heard.text("stdout").endswith("the end\n")


def test_a_hung_executed_rank_shows_its_stack_too(make_group: MakeGroup) -> None:
    group = make_group(preload=("tests.support.threaded_import",))
    group.start()
    call = group.submit(Misbehave(fault="hang"))
    with pytest.raises(Exception, match="fault_hang"):
        group.wait(call, 0.3)


def test_an_idle_group_uses_no_processor_time(start_group: MakeGroup) -> None:
    group = start_group()
    guard_pid = ask(group, "session")[0]
    pids = [guard_pid, *(worker.pid for worker in group.workers)]

    def ticks() -> int:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum(int(stat[11]) + int(stat[12]) for stat in stats)

    def idle_second() -> tuple[int, float]:
        before, own = ticks(), time.process_time()
        deadline = time.monotonic() + 1.0
        while (left := deadline - time.monotonic()) > 0:
            group.poll(left)
        return ticks() - before, time.process_time() - own

    # OpenMP's threads spin on for a while after the region that proves them in a forked rank.
    idle = [idle_second() for _ in range(3)]
    assert idle[-1][0] <= 1
    assert max(own for _, own in idle) < 0.02


def test_what_the_user_holds_is_not_touched_by_a_fork(
    make_group: MakeGroup, tmp_path: Path
) -> None:
    import gc
    import tempfile

    class Cycle:
        def __init__(self) -> None:
            self.itself = self
            self.directory = tempfile.TemporaryDirectory(dir=tmp_path)
            self.pair = socket.socketpair()
            self.file = (tmp_path / "buffered").open("w")
            self.file.write("text")

    cycle = Cycle()
    directory, peer = Path(cycle.directory.name), cycle.pair[1].dup()
    pair, file, holder = cycle.pair, cycle.file, cycle.directory
    peer.setblocking(False)
    gc.disable()
    try:
        del cycle  # garbage now, which only a collection would find
        group = make_group(method="fork", config=FakeConfig())
        group.start()
        ask(group, "modules")
        group.close()
        assert directory.is_dir()
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        assert (tmp_path / "buffered").read_text() == ""
    finally:
        gc.enable()
        for sock in (*pair, peer):
            sock.close()
        file.close()
        holder.cleanup()
