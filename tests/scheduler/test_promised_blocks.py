from __future__ import annotations

from llmrt.scheduler.promised_blocks import PromisedBlocks
from llmrt.scheduler.request import Sequence
from tests.scheduler.test_waiting_queue import make_sequence

FIRST, SECOND, THIRD = b"1", b"2", b"3"


def test_a_sequence_waits_for_the_last_block_that_it_can_share() -> None:
    promises = PromisedBlocks(wake=lambda _: None)
    promises.promise(make_sequence(0), [FIRST, SECOND])
    later = make_sequence(1)
    assert promises.last_worth_waiting_for(later, [FIRST, SECOND, THIRD]) == SECOND
    assert promises.last_worth_waiting_for(later, [THIRD, FIRST]) is None
    assert promises.last_worth_waiting_for(later, []) is None


def test_everybody_parked_on_a_block_is_woken_once_when_it_is_there() -> None:
    woken: list[Sequence] = []
    promises = PromisedBlocks(wake=woken.append)
    owner, other, third = (make_sequence(i) for i in range(3))
    promises.promise(owner, [FIRST, SECOND])
    promises.promise(other, [SECOND])
    promises.park(other, SECOND)
    promises.park(third, SECOND)
    promises.settle(owner, [FIRST])
    promises.settle(other, [SECOND])
    assert woken == [], "the promise is the first one's"
    promises.check_invariants()
    promises.settle(owner, [SECOND])
    promises.settle(owner, [SECOND])
    assert woken == [other, third]
    assert promises.num_parked == 0
    promises.check_invariants()
