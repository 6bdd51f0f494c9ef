"""PrefixCache: which block holds the keys and values of which tokens.

A full block is known by the hash of its tokens and of all tokens before it:

    hash(block i) = BLAKE2b(hash(block i - 1) + tokens of block i)        hash(block -1) = salt

so equal hashes mean equal contents *and* equal positions. 128 bits of a cryptographic hash: nobody
finds two chains with one hash, not even on purpose. This is numbers only; whether a block is in use
is the BlockManager's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

_DIGEST_BYTES = 16


class PrefixCache:
    """A mapping of block hashes to block numbers, and back."""

    def __init__(self, salt: bytes = b"") -> None:
        self._root = blake2b(salt, digest_size=_DIGEST_BYTES).digest()
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of_hash)

    def chain(self, parent: bytes | None, token_ids: Iterable[int]) -> bytes:
        """Return the hash of a full block after the block *parent*; None for the first block."""
        data = (parent or self._root) + array("q", token_ids).tobytes()
        return blake2b(data, digest_size=_DIGEST_BYTES).digest()

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with these contents."""
        return self._block_of_hash.get(block_hash)

    def holds(self, block_id: int) -> bool:
        """Whether the block's contents can be found."""
        return block_id in self._hash_of_block

    def insert(self, block_hash: bytes, block_id: int) -> None:
        """Make a full block findable; of equal ones the first stays the one that is found."""
        if block_hash not in self._block_of_hash:
            self._block_of_hash[block_hash] = block_id
            self._hash_of_block[block_id] = block_hash

    def forget(self, block_id: int) -> None:
        """Forget one block: its place is about to be written again."""
        del self._block_of_hash[self._hash_of_block.pop(block_id)]

    def reset(self) -> None:
        """Forget every block."""
        self._block_of_hash.clear()
        self._hash_of_block.clear()

    def check_invariants(self) -> None:
        """Assert that the two mappings are each other's inverse."""
        assert {b: h for h, b in self._block_of_hash.items()} == self._hash_of_block
