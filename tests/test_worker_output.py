"""What workers print, as their user meets it: in order, and on behalf of whoever caused it."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrt import Engine, SamplingParams

CELL: contextvars.ContextVar[str] = contextvars.ContextVar("CELL", default="nobody's")


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, tp=2) as engine:
        yield engine


class CellHandler(logging.Handler):
    """Remembers each line with what CELL is where it is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append((CELL.get(), record.getMessage()))


@pytest.fixture
def handler() -> Iterator[CellHandler]:
    logger, handler = logging.getLogger("llmrt.worker"), CellHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_what_a_function_printed_is_there_when_it_returns(
    llm: Engine, handler: CellHandler
) -> None:
    for number in range(50):
        llm.collective_rpc(lambda worker, number=number: print("said", number))
        lines = {f"rank {rank}: said {number}" for rank in (0, 1)}
        assert {line for _, line in handler.heard[-2:]} == lines


def test_lines_are_logged_in_the_context_of_the_call_that_caused_them(
    llm: Engine, handler: CellHandler
) -> None:
    for name in ("first", "second"):
        context = contextvars.copy_context()
        context.run(CELL.set, name)
        context.run(llm.collective_rpc, lambda worker: print("hello"))
        assert {cell for cell, _ in handler.heard[-2:]} == {name}


class PrintingProcessor:
    """A logits processor that says when it runs."""

    def __call__(self, prompt: object, output: object, logits: object) -> object:
        print("processing")
        return logits


def test_lines_of_a_step_are_logged_in_the_context_of_its_request(
    llm: Engine, handler: CellHandler
) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logits_processors=[PrintingProcessor()]
    )
    context = contextvars.copy_context()
    context.run(CELL.set, "asked")
    context.run(llm.generate, "a", params)
    llm.collective_rpc(lambda worker: None)  # what was printed before has come by now
    assert handler.heard[0] == ("asked", "rank 0: processing")
