from __future__ import annotations

import io
import os
import threading
from typing import Any

import pytest

from llmrt.display.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class WriteOnly:
    """A stream as some notebooks put in place of stderr: no fileno, no isatty."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def show_everything(progress: Progress) -> None:
    with progress:
        progress.phase("reading")
        progress.phase("loading", 1, 4)
        with progress.download("a model", 100) as report:
            report(40)
            report(150)
        progress.phase("starting")


def test_a_terminal_shows_the_bar_and_the_line() -> None:
    terminal = Terminal()
    show_everything(Progress("auto", stream=terminal))
    shown = terminal.getvalue()
    assert "llmrt: reading" in shown
    assert "llmrt: loading 25 %" in shown
    assert "llmrt: downloading a model" in shown
    assert "llmrt: starting" in shown
    assert shown.endswith("\r" + " " * len("llmrt: starting") + "\r"), "the line is taken away"


@pytest.mark.parametrize("stream", [io.StringIO(), WriteOnly()])
def test_nothing_is_shown_where_nobody_looks(stream: Any) -> None:
    progress = Progress("auto", stream=stream)
    show_everything(progress)
    assert not progress.enabled
    assert (stream.getvalue() if isinstance(stream, io.StringIO) else stream.text) == ""


def test_false_shows_nothing_even_on_a_terminal() -> None:
    terminal = Terminal()
    show_everything(Progress(False, stream=terminal))
    assert terminal.getvalue() == ""


def test_true_shows_on_a_stream_that_can_only_be_written() -> None:
    stream: Any = WriteOnly()
    show_everything(Progress(True, stream=stream))
    assert "llmrt: loading 25 %" in stream.text


def test_a_notebook_shows_it() -> None:
    notebook_stream = type("OutStream", (WriteOnly,), {"__module__": "ipykernel.iostream"})()
    show_everything(Progress("auto", stream=notebook_stream))
    assert "llmrt: downloading" in notebook_stream.text


def test_a_program_without_stderr_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    show_everything(Progress("auto"))
    show_everything(Progress(True))


def test_stdout_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    show_everything(Progress(True))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "llmrt" in captured.err


def test_no_thread_stays() -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    show_everything(Progress(True, stream=Terminal()))
    assert (threading.active_count(), len(os.listdir("/proc/self/task"))) == before
