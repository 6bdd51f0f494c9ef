"""How much shared memory the CPU ranks of one host need, and where each part of it lies.

    0            4096                  8192
    │ the runtime's │ one flag a rank, 64 bytes apart … │ rank 0: slot 0, slot 1 │ rank 1: slot 0, …

Torch-free: the driver makes the memory file, the ranks map it.
"""

from __future__ import annotations

RUNTIME_BYTES = 4096
"""The first page is the runtime's own."""
FLAG_BYTES = 64
"""A cache line for each rank's flag, so that ranks do not slow each other down."""
SLOT_BYTES = 1 << 20
"""One slot; longer tensors go through it in pieces. Pages nobody touches cost nothing."""
SLOTS_PER_RANK = 2
_PAGE_BYTES = 4096


def flag_offset(rank: int) -> int:
    """Return where the flag of *rank* lies in the file."""
    return RUNTIME_BYTES + rank * FLAG_BYTES


def slots_offset(world_size: int) -> int:
    """Return where the first slot lies in the file: on a page of its own."""
    flags_end = flag_offset(world_size)
    return -(-flags_end // _PAGE_BYTES) * _PAGE_BYTES


def slot_offset(world_size: int, rank: int, index: int) -> int:
    """Return where slot *index* (0 or 1) of *rank* lies in the file."""
    return slots_offset(world_size) + (rank * SLOTS_PER_RANK + index) * SLOT_BYTES


def shared_memory_bytes(world_size: int) -> int:
    """Return how long the memory file of *world_size* ranks has to be."""
    return slot_offset(world_size, world_size, 0)
