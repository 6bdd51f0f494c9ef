"""TerminalChat: a conversation with a model in a terminal, line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from llmrt.errors import RequestError
from llmrt.outputs import Increment

Message = dict[str, str]
Answer = Callable[[Sequence[Message]], Iterable[Increment]]
"""Streams the answer to a conversation; dropping the iterator ends the answer."""

HELP = "/reset forgets what was said, /system TEXT says how to behave, /exit or Ctrl-D leaves"
PROMPT = "> "


class TerminalChat:
    """Reads lines, streams answers and remembers both. Ctrl-C ends the answer only."""

    def __init__(self, answer: Answer, *, system: str | None = None) -> None:
        self._answer = answer
        self._system = system
        self._turns: list[Message] = []

    def run(self) -> None:
        """Talk until the user leaves."""
        _load_line_editing()
        if sys.stdin.isatty():
            _say(HELP)
        while True:
            try:
                line = input(PROMPT if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._converse(line)

    def _obey(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        if command == "/reset":
            self._turns.clear()
        elif command == "/system":
            self._system = argument.strip() or None
            self._turns.clear()
        else:
            _say(HELP)

    def _converse(self, line: str) -> None:
        self._turns.append({"role": "user", "content": line})
        try:
            text = self._print_answer()
        except RequestError as error:
            self._turns.pop()
            _say(f"error: {error}")
            return
        self._turns.append({"role": "assistant", "content": text})

    def _print_answer(self) -> str:
        """Print the answer as it comes and return as much of it as came."""
        opening = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[str] = []
        with suppress(KeyboardInterrupt):
            for increment in self._answer([*opening, *self._turns]):
                pieces.append(increment.text)
                print(increment.text, end="", flush=True)
        print(flush=True)
        return "".join(pieces)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _load_line_editing() -> None:
    # Importing it gives input() its editing and history; some builds of Python lack it.
    with suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
