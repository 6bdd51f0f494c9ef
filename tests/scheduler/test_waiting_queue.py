from __future__ import annotations

from llmrt.scheduler.request import Sequence
from llmrt.scheduler.waiting_queue import MAX_OVERTAKES, WaitingQueue
from tests.scheduler.simulation import make_request


def make_sequence(seq_id: int, priority: int = 0) -> Sequence:
    request = make_request(str(seq_id), [1], priority=priority)
    return Sequence(request=request, index=0, seq_id=seq_id, max_output_tokens=5)


def take(queue: WaitingQueue) -> int | None:
    sequence = queue.peek()
    if sequence is None:
        return None
    assert queue.peek() is sequence, "the head must stay the head"
    queue.pop(sequence)
    return sequence.seq_id


def test_the_order_is_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for seq_id, priority in enumerate([1, 0, 1, 0]):
        queue.push(make_sequence(seq_id, priority))
    assert [take(queue) for _ in range(5)] == [1, 3, 0, 2, None]


def test_one_that_comes_back_takes_its_old_place() -> None:
    queue = WaitingQueue()
    sequences = [make_sequence(i) for i in range(3)]
    for sequence in sequences:
        queue.push(sequence)
    assert take(queue) == 0
    queue.push(sequences[0])
    assert [take(queue) for _ in range(3)] == [0, 1, 2]


def test_the_oldest_is_passed_over_a_limited_number_of_times_and_then_ranks_first() -> None:
    queue = WaitingQueue()
    patient = make_sequence(0, priority=9)
    queue.push(patient)
    for seq_id in range(1, 30):
        queue.push(make_sequence(seq_id))
    taken = [take(queue) for _ in range(MAX_OVERTAKES + 1)]
    assert taken == [*range(1, MAX_OVERTAKES + 1), 0]
    assert patient.rank < make_sequence(99, priority=-1000).rank


def test_a_discarded_one_is_not_returned_and_does_not_count() -> None:
    queue = WaitingQueue()
    sequences = [make_sequence(i) for i in range(3)]
    for sequence in sequences:
        queue.push(sequence)
    queue.discard(sequences[0])
    queue.discard(sequences[0])
    assert len(queue) == 2
    assert list(queue) == sequences[1:]
    assert take(queue) == 1


def test_discarded_ones_do_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.push(make_sequence(0))
    for seq_id in range(1, 2000):
        sequence = make_sequence(seq_id)
        queue.push(sequence)
        queue.discard(sequence)
    assert queue.num_entries < 200
    assert take(queue) == 0
