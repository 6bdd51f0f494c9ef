"""What each sequence runs in a step, and which of them begin with the same blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LEAST_SPARED_BLOCKS = 192
"""A prefix that is read once for all costs two products more, so it must spare so many blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The tokens that one sequence runs in a step."""

    row: int
    """Its first row among the tokens of the step."""
    start: int
    """Position of that token in the sequence."""
    num_tokens: int
    block_ids: list[int]
    """The sequence's block table."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


def by_prefix(spans: Sequence[Span], block_size: int) -> Iterator[tuple[int, Sequence[Span]]]:
    """Yield together those that begin with the same blocks, and how many blocks these are.

    All that share too little come together, with 0. Each time the order is that of *spans*.
    """
    families: dict[int, list[Span]] = {}
    for span in spans:
        families.setdefault(span.block_ids[0], []).append(span)
    rest: list[Span] = []
    for family in families.values():
        num_shared = num_shared_blocks(family, block_size)
        if num_shared:
            yield num_shared, family
        else:
            rest += family
    if rest:
        yield 0, sorted(rest, key=lambda span: span.row)


def num_shared_blocks(spans: Sequence[Span], block_size: int) -> int:
    """Return with how many same blocks all begin, each of them before every token that runs.

    0 where that would spare too little.
    """
    most = min(span.start for span in spans) // block_size
    tables = [span.block_ids for span in spans]
    # What the least and the greatest begin with, all between them do.
    pairs = zip(min(tables)[:most], max(tables)[:most], strict=True)
    num_shared = next((i for i, (low, high) in enumerate(pairs) if low != high), most)
    return num_shared if num_shared * (len(spans) - 1) >= LEAST_SPARED_BLOCKS else 0
