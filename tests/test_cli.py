from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from llmrt.cli import main
from llmrt.errors import ConfigError, EngineStartError, RequestError
from llmrt.outputs import Increment


class FakeEngine:
    """Answers with the words it is given, and remembers what it was asked."""

    def __init__(self, *, words: Sequence[str] = ("Hel", "lo"), has_template: bool = True) -> None:
        self.words = words
        self.tokenizer = SimpleNamespace(has_chat_template=has_template)
        self.opened_with: tuple[Any, dict[str, Any]] | None = None
        self.asked: list[tuple[Any, Any]] = []
        self.is_open = False
        self.fails_with: BaseException | None = None
        self.fails_before_word = 0

    def __call__(self, model: str | None, **options: Any) -> FakeEngine:
        self.opened_with = (model, options)
        return self

    def __enter__(self) -> FakeEngine:
        self.is_open = True
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_open = False

    def stream(self, prompt: Any, params: Any) -> Iterator[Increment]:
        self.asked.append((json.loads(json.dumps(prompt)), params))
        for number, word in enumerate(self.words):
            if self.fails_with is not None and number == self.fails_before_word:
                error, self.fails_with = self.fails_with, None
                raise error
            yield Increment(text=word, token_ids=(number,))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def run(engine: FakeEngine, *arguments: str) -> int:
    return main(arguments, engine=engine)  # pyright: ignore[reportArgumentType]


# ---- run ----


def test_run_prints_the_answer_and_nothing_else(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(engine, "run", "Hi") == 0
    assert capsys.readouterr() == ("Hello\n", "")
    prompt, params = engine.asked[0]
    assert prompt == [{"role": "user", "content": "Hi"}]
    assert (params.temperature, params.max_tokens) == (0, 512)
    assert not engine.is_open


@pytest.mark.parametrize(("raw", "has_template"), [(True, True), (False, False)])
def test_run_gives_the_prompt_as_it_is_where_asked_or_needed(raw: bool, has_template: bool) -> None:
    engine = FakeEngine(has_template=has_template)
    assert run(engine, "run", "Hi", *(["--raw"] if raw else [])) == 0
    assert engine.asked[0][0] == "Hi"


def test_run_hands_its_options_to_the_engine(engine: FakeEngine) -> None:
    line = "run Hi --model m --tp 3 --backend mp --device cpu --dtype float32 --max-tokens 7"
    assert run(engine, *line.split(), "--temperature", "0.5") == 0
    options = {"tp": 3, "backend": "mp", "device": "cpu", "dtype": "float32"}
    assert engine.opened_with == ("m", options)
    assert (engine.asked[0][1].temperature, engine.asked[0][1].max_tokens) == (0.5, 7)


def test_a_dash_reads_the_prompt_from_stdin(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert run(engine, "run", "-", "--raw") == 0
    assert engine.asked[0][0] == "two\nlines"


def test_the_answer_is_shown_as_it_comes(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def words() -> Iterator[str]:
        for word in ("one ", "two"):
            seen.append(capsys.readouterr().out)
            yield word

    engine.words = words()  # pyright: ignore[reportAttributeAccessIssue]
    run(engine, "run", "Hi")
    assert seen == ["", "one "]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such model\nand more"), 2),
        (RequestError("no such model"), 2),
        (EngineStartError("no such model\nremote traceback"), 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: Exception, code: int, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fails_with = error
    assert run(engine, "run", "Hi") == code
    assert capsys.readouterr() == ("", "llmrt: error: no such model\n")
    assert not engine.is_open


def test_a_bad_parameter_is_an_error_before_anything_starts(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(engine, "run", "Hi", "--max-tokens", "-1") == 2
    assert "llmrt: error: max_tokens" in capsys.readouterr().err
    assert engine.opened_with is None


def test_an_interrupt_closes_the_engine_and_exits_as_shells_expect(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fails_with, engine.fails_before_word = KeyboardInterrupt(), 1
    assert run(engine, "run", "Hi") == 130
    assert capsys.readouterr() == ("Hel", "")
    assert not engine.is_open


@pytest.mark.parametrize("arguments", [[], ["walk"], ["run"], ["run", "Hi", "--tp", "x"]])
def test_misuse_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: llmrt" in capsys.readouterr().err


# ---- chat ----


def talk(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, *lines: Any, args: str = "") -> int:
    """Type these lines (an exception is raised in place of one), then Ctrl-D."""
    typed = iter([*lines, EOFError()])

    def read(prompt: str = "") -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    return run(engine, "chat", *args.split())


def contents(conversation: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in conversation]


def test_chat_remembers_both_sides(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(engine, monkeypatch, "one", "", "two") == 0
    assert [contents(prompt) for prompt, _ in engine.asked] == [["one"], ["one", "Hello", "two"]]
    assert capsys.readouterr().out == "Hello\nHello\n"
    assert not engine.is_open


def test_chat_can_forget_and_be_told_how_to_behave(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["one", "/reset", "two", "/system Be brief.", "three", "/system", "four", "/exit", "no"]
    talk(engine, monkeypatch, *lines, args="--system Rhyme.")
    asked = [contents(prompt) for prompt, _ in engine.asked]
    assert asked == [["Rhyme.", "one"], ["Rhyme.", "two"], ["Be brief.", "three"], ["four"]]


def test_an_unknown_command_is_not_said_to_the_model(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(engine, monkeypatch, "/what")
    assert engine.asked == []
    assert "/reset" in capsys.readouterr().err


def test_an_interrupt_ends_the_answer_and_not_the_chat(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fails_with, engine.fails_before_word = KeyboardInterrupt(), 1
    assert talk(engine, monkeypatch, "one", KeyboardInterrupt(), "two") == 0
    assert contents(engine.asked[1][0]) == ["one", "Hel", "two"]
    assert capsys.readouterr().out == "Hel\n\nHello\n"


def test_a_refused_message_is_told_and_taken_back(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fails_with = RequestError("the prompt is too long")
    assert talk(engine, monkeypatch, "long", "short") == 0
    assert contents(engine.asked[1][0]) == ["short"]
    assert "the prompt is too long" in capsys.readouterr().err


# ---- as a program ----

PROGRAM = """
import sys
from tests.test_cli import FakeEngine
from llmrt.cli import main
sys.exit(main(sys.argv[1:], engine=FakeEngine(words=["é😀 "] * 20000)))
"""


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=60, **options)


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = program("run", "Hi", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_report_that_nobody_reads_ends_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = program("doctor", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_terminal_that_cannot_show_a_character_gets_another() -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = program("run", "Hi", stdout=subprocess.PIPE, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"?? ??")


def test_the_module_is_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmrt", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("llmrt ")


def test_doctor_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    assert "llmrt" in json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == 0
    assert "llmrt" in capsys.readouterr().out
