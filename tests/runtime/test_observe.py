"""Reading a process: through a made-up /proc and `sys`, and this very process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from llmrt.runtime.environment import Environment, Host
from llmrt.runtime.observe import observe

STATUS = "Name:\tpython\nVmRSS:\t  900000 kB\nRssAnon:\t  500000 kB\nThreads:\t7\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "fd").mkdir()
    (tmp_path / "status").write_text(STATUS)
    return tmp_path


@pytest.fixture
def look(proc: Path) -> Callable[..., Environment]:
    """Observe a process with this /proc and these modules."""

    def observe_it(modules: dict[str, Any] | None = None, **environ: str) -> Environment:
        interpreter = SimpleNamespace(
            modules=modules or {},
            flags=SimpleNamespace(interactive=0, inspect=0),
            platform="linux",
            orig_argv=["python", "script.py"],
            gettrace=lambda: None,
        )
        return observe(interpreter=interpreter, environ=environ, proc=proc)

    return observe_it


def open_file(proc: Path, target: str) -> None:
    descriptors = proc / "fd"
    (descriptors / str(len(os.listdir(descriptors)))).symlink_to(target)


@pytest.mark.parametrize(
    "device",
    [
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-caps/nvidia-cap1",
        "/dev/kfd",
        "/dev/dri/renderD128",
        "/dev/dxg",
        "/dev/accel/accel0",
        "/dev/accel0",
    ],
)
def test_an_open_accelerator_is_seen_whoever_opened_it(
    device: str, proc: Path, look: Callable[..., Environment]
) -> None:
    open_file(proc, "/dev/null")
    open_file(proc, device)
    open_file(proc, device)
    assert look().open_accelerators == (device,)


def test_other_files_are_no_accelerators(proc: Path, look: Callable[..., Environment]) -> None:
    for target in (
        "/dev/null",
        "/dev/dri/card0",
        "/home/dev/nvidia0",
        "socket:[17]",
        "anon_inode:[eventpoll]",
        "/dev/shm/x",
    ):
        open_file(proc, target)
    assert look().open_accelerators == ()


def test_descriptors_that_cannot_be_read_are_not_taken_for_none(
    proc: Path, look: Callable[..., Environment]
) -> None:
    (proc / "fd").rmdir()
    assert look().open_accelerators is None


def test_what_torch_says_counts_only_where_torch_is_imported(
    look: Callable[..., Environment],
) -> None:
    torch = module("torch.cuda", is_initialized=lambda: True)
    assert look({"torch.cuda": torch}).open_accelerators == ("torch.cuda",)
    idle = module("torch.cuda", is_initialized=lambda: False)
    assert look({"torch.cuda": idle}).open_accelerators == ()
    half_imported = module("torch.cuda")
    assert look({"torch.cuda": half_imported}).open_accelerators == ()


def test_memory_and_threads_are_the_kernels_numbers(look: Callable[..., Environment]) -> None:
    environment = look()
    assert environment.anonymous_bytes == 500000 * 1024
    assert environment.num_native_threads == 7


def test_a_kernel_that_does_not_tell_anonymous_memory_apart_counts_all_of_it(
    proc: Path, look: Callable[..., Environment]
) -> None:
    (proc / "status").write_text("VmRSS:\t  900000 kB\n")
    assert look().anonymous_bytes == 900000 * 1024
    assert look().num_native_threads is None


def test_a_process_without_proc_has_unknown_memory(
    proc: Path, look: Callable[..., Environment]
) -> None:
    (proc / "status").unlink()
    assert look().anonymous_bytes is None


def test_the_variable_is_read_and_an_empty_one_is_none(look: Callable[..., Environment]) -> None:
    assert look(LLMRT_WORKER_MULTIPROC_METHOD="spawn").method_variable == "spawn"
    assert look(LLMRT_WORKER_MULTIPROC_METHOD="").method_variable is None
    assert look().method_variable is None


def module(name: str, **attributes: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


def ray_modules(initialized: bool, mode: int = 0) -> dict[str, ModuleType]:
    worker = module("ray._private.worker", global_worker=SimpleNamespace(mode=mode))
    return {
        "ray": module("ray", is_initialized=lambda: initialized),
        "ray._raylet": module("ray._raylet"),
        "ray._private.worker": worker,
    }


def test_ray_counts_once_it_is_initialised(look: Callable[..., Environment]) -> None:
    assert look(ray_modules(initialized=False)).ray is None
    assert look(ray_modules(initialized=True, mode=0)).ray == "driver"
    assert look(ray_modules(initialized=True, mode=1)).ray == "worker"


def test_a_module_merely_called_ray_fools_nobody(look: Callable[..., Environment]) -> None:
    """A ray tracer of the user's may well have a function of that name."""
    impostor = module("ray", is_initialized=lambda: True, __version__="2.9.0")
    assert look({"ray": impostor}).ray is None


def test_a_ray_that_is_still_being_imported_is_not_initialised(
    look: Callable[..., Environment],
) -> None:
    assert look({"ray": module("ray"), "ray._raylet": module("ray._raylet")}).ray is None


def test_this_process_is_seen_as_it_is() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(60,))
    before = observe()
    thread.start()
    try:
        after = observe()
    finally:
        stop.set()
        thread.join(60)
    assert before.host is Host.TEST_RUNNER
    assert before.platform == sys.platform
    assert before.machine == os.uname().machine
    assert before.ray is None
    assert before.num_native_threads is not None
    assert after.num_native_threads == before.num_native_threads + 1


def test_memory_that_this_process_takes_is_seen() -> None:
    before = observe().anonymous_bytes
    filled = bytearray(b"x" * (64 << 20))
    after = observe().anonymous_bytes
    assert before is not None
    assert after is not None
    assert after - before > len(filled) // 2


def test_a_real_descriptor_is_found_by_what_it_points_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    monkeypatch.setattr("llmrt.runtime.observe.ACCELERATOR_FILES", (f"{tmp_path}/nvidia*",))
    assert observe().open_accelerators == ()
    with device.open():
        assert observe().open_accelerators == (str(device),)
    assert observe().open_accelerators == ()


def test_observing_leaves_no_descriptor_and_no_module_behind() -> None:
    observe()
    modules, descriptors = set(sys.modules), sorted(os.listdir("/proc/self/fd"))
    observe()
    assert set(sys.modules) == modules
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
