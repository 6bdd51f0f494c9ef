"""What a rank printed is handed on before anything that happens after its answer."""

from __future__ import annotations

import os
from typing import Any

from llmrt.by_value import dumps_call
from llmrt.runtime.launchers.inprocess import InProcessLauncher
from tests.runtime.conftest import MakeGroup
from tests.support.fake_workers import Ask, Echo, Misbehave


def call(group: Any, function: Any) -> list[object]:
    return group.call(Ask(what="result", arguments=(dumps_call(function),)), 10)


def test_what_was_printed_for_a_call_is_there_after_catching_up(start_group: MakeGroup) -> None:
    group = start_group()
    for number in range(1, 30):
        group.call(Misbehave(fault="print", argument=10), 10)
        group.catch_up_with_output()
        for rank in (0, 1):
            assert group.heard.text("stdout", rank).count("the end\n") == number


def test_a_rank_that_closed_its_output_owes_none(start_group: MakeGroup) -> None:
    group = start_group()
    call(group, lambda rank: os.close(1))
    for _ in range(2):
        group.catch_up_with_output()
        assert group.call(Echo(value=1), 10) == [1, 1]


def test_a_dead_rank_is_not_waited_for(start_group: MakeGroup) -> None:
    group = start_group()
    pending = group.submit(Misbehave(fault="kill", rank=1))
    while group.failure is None:
        group.poll(5)
    group.catch_up_with_output()
    assert 1 in pending.missing


def test_a_thread_of_this_process_owes_none(make_group: MakeGroup) -> None:
    group = make_group(num_ranks=1, launcher=InProcessLauncher())
    group.start()
    assert group.call(Echo(value=1), 10) == [1]
    group.catch_up_with_output()
    assert not any(view.owes_output for view in group._supervisor.ranks)  # type: ignore[union-attr]
