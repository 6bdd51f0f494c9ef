"""A Jupyter kernel of its own, used cell by cell as a notebook uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import pytest


@dataclass
class Cell:
    """What came of one cell."""

    status: str = "running"
    error: str = ""
    """The exception's name, where it raised."""
    stdout: str = ""
    stderr: str = ""
    values: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "stream" and content["name"] == "stdout":
            self.stdout += content["text"]
        elif kind == "stream":
            self.stderr += content["text"]
        elif kind == "execute_result":
            self.values.append(content["data"]["text/plain"])
        elif kind == "error":
            self.error = content["ename"]


class Kernel:
    """The notebook's end of a kernel."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.cells: dict[str, Cell] = {}
        self._connect()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)

    def run(self, code: str, seconds: float = 60.0) -> Cell:
        """Run a cell to its end."""
        return self.wait_for(self.start(code), seconds)

    def start(self, code: str) -> str:
        """Start a cell; return its id."""
        cell_id = str(self._client.execute(code))
        self.cells[cell_id] = Cell()
        return cell_id

    def wait_for(self, cell_id: str, seconds: float = 60.0) -> Cell:
        """Wait until a cell is over, with all that it shows."""
        started_at = time.monotonic()
        cell = self.cells[cell_id]
        while cell.status == "running":
            self._read(started_at + seconds)
        cell.seconds = time.monotonic() - started_at
        return cell

    def wait_for_text(self, cell_id: str, text: str, seconds: float = 60.0) -> None:
        """Wait until a running cell has printed a text."""
        deadline = time.monotonic() + seconds
        while text not in self.cells[cell_id].stdout + self.cells[cell_id].stderr:
            self._read(deadline)

    def interrupt(self) -> None:
        """Do what the Interrupt button does."""
        self.manager.interrupt_kernel()

    def restart(self) -> None:
        """Do what the Restart button does."""
        self._client.stop_channels()
        self.manager.restart_kernel(now=True)
        self._connect()

    def close(self) -> None:
        self._client.stop_channels()

    def _connect(self) -> None:
        self._client = self.manager.blocking_client()
        self._client.start_channels(hb=False)
        self._client.wait_for_ready(timeout=60)

    def _read(self, deadline: float) -> None:
        try:
            message = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise AssertionError(f"the kernel says nothing more: {self.cells}") from None
        cell = self.cells.get(message["parent_header"].get("msg_id"))
        if cell is None:
            return
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            cell.status = "error" if cell.error else "ok"
        cell.add(kind, content)


@pytest.fixture(scope="session")
def jupyter_loop() -> Iterator[None]:
    """Make the event loop that jupyter_client keeps for its thread; no test leaves it behind."""
    from jupyter_core.utils import ensure_event_loop

    loop = ensure_event_loop()
    yield
    loop.close()


@contextmanager
def open_kernel(cwd: Path, environ: Mapping[str, str]) -> Iterator[Kernel]:
    """Start a kernel; it is killed at the end."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    manager.start_kernel(cwd=str(cwd), env=dict(environ))
    kernel = None
    try:
        kernel = Kernel(manager)
        yield kernel
    finally:
        if kernel is not None:
            kernel.close()
        manager.shutdown_kernel(now=True)
        manager.context.destroy(linger=0)
