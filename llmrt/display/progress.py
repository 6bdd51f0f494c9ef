"""Progress: what a waiting user sees while a model is fetched and loaded; on stderr only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from llmrt.outputs import TimelineEntry


class Progress:
    """Shows downloads as a bar and loading as one line that changes; both go when it is closed.

    `auto` shows them on a terminal and in a notebook, and nowhere else. The stream is asked for
    nothing but `write` and `flush`: notebooks replace stderr by objects that have no more.
    """

    def __init__(
        self, mode: Literal["auto"] | bool = "auto", *, stream: TextIO | None = None
    ) -> None:
        self._stream: TextIO | None = stream or sys.stderr
        self.on_terminal = mode is not False and _is_terminal(self._stream)
        """Whether it is shown on a terminal, which subprocesses can write to as well."""
        self.enabled = bool(self._stream) and (
            mode is True or self.on_terminal or (mode == "auto" and _is_notebook(self._stream))
        )
        self._line: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def phase(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show *text* as the one line, with a percentage where *total* is known."""
        if not self.enabled:
            return
        if self._line is None:
            self._line = _bar_class()(bar_format="{desc}", leave=False, file=self._stream)
        percent = f" {100 * done // total} %" if total else ""
        self._line.set_description_str(f"llmrt: {text}{percent}")

    def show(self, entry: TimelineEntry) -> None:
        """Show what a starting engine is doing as the one line."""
        where = "" if entry.rank is None else f"rank {entry.rank}: "
        self.phase(f"{where}{entry.phase} {entry.detail}".rstrip())

    @contextmanager
    def download(self, what: str, total_bytes: int) -> Generator[Callable[[int], None]]:
        """Show a bar; the yielded function is told how many bytes are there."""
        if not self.enabled:
            yield lambda num_bytes: None
            return
        self.close()
        with _bar_class()(
            desc=f"llmrt: downloading {what}",
            total=total_bytes,
            unit="B",
            unit_scale=True,
            leave=False,
            file=self._stream,
        ) as bar:

            def report(num_bytes: int) -> None:
                bar.update(min(num_bytes, total_bytes) - bar.n)

            yield report

    def close(self) -> None:
        """Take the line away."""
        if self._line is not None:
            self._line.close()
            self._line = None


def _bar_class() -> Any:
    from tqdm import tqdm

    class Bar(tqdm):  # pyright: ignore[reportMissingTypeArgument, reportUntypedBaseClass, reportUnknownVariableType]
        # The monitor is a thread that would stay for good.
        monitor_interval = 0

    return Bar  # pyright: ignore[reportUnknownVariableType]


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # not a whole file object; already closed
        return False


def _is_notebook(stream: TextIO | None) -> bool:
    return type(stream).__module__.partition(".")[0] == "ipykernel"
