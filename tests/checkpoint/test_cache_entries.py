from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llmrt import cache_entries
from llmrt.cache_entries import building, cache_folder
from llmrt.errors import ConfigError


def test_the_folder_is_the_one_named_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRT_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("LLMRT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/llmrt")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/invalid")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/llmrt")


def test_a_failed_build_leaves_nothing_but_the_lock_file(cache: Path) -> None:
    def fail_half_way() -> None:
        with building(cache / "entry") as build:
            (build.folder / "part").write_text("x")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert [path.name for path in cache.iterdir()] == ["entry.lock"]


def test_descriptors_are_given_back(cache: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with building(cache / "entry"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_one_builds_at_a_time(cache: Path) -> None:
    entry, waited, built = cache / "entry", threading.Event(), []

    def second() -> None:
        with building(entry, on_wait=waited.set):
            built.append(entry.exists())

    with building(entry):
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(10)
        entry.write_text("whole")
    thread.join(10)
    assert built == [True], "the second came in after the first had finished"


HOLDER = """
import subprocess, sys, time
from pathlib import Path
from llmrt.cache_entries import building
with building(Path(sys.argv[1])) as build:
    (build.folder / "half").write_text("x")
    helper = [sys.executable, "-c", "import sys; print('on', flush=True); sys.stdin.read()"]
    if sys.argv[2] == "with helper":
        subprocess.Popen(helper, stdin=0, pass_fds=[build.lock_fd])
    else:
        print("on", flush=True)
    time.sleep(100)
"""


def holder(entry: Path, kind: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(entry), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"on\n"
    return process


def test_a_killed_holder_frees_the_lock_and_its_remains_are_cleared(cache: Path) -> None:
    entry = cache / "entry"
    with holder(entry, "alone") as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert (cache / "entry.partial" / "half").exists()
        with building(entry) as build:
            assert list(build.folder.iterdir()) == []


def test_the_lock_is_held_as_long_as_a_helper_of_the_killed_holder_lives(cache: Path) -> None:
    entry, waited = cache / "entry", threading.Event()
    with holder(entry, "with helper") as process:
        process.send_signal(signal.SIGKILL)
        process.wait(10)

        def end_helper() -> None:
            waited.set()
            assert process.stdin is not None
            process.stdin.close()

        with building(entry, on_wait=end_helper):
            assert waited.is_set()


def test_waiting_has_an_end_that_names_the_lock(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_entries, "LOCK_WAIT_SECONDS", 0.05)
    with (
        building(cache / "entry"),
        pytest.raises(ConfigError, match=r"entry\.lock"),
        building(cache / "entry"),
    ):
        pass


def test_a_folder_that_cannot_be_made_says_how_to_name_another(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="LLMRT_CACHE"),
        building(tmp_path / "file" / "cache" / "entry"),
    ):
        pass
