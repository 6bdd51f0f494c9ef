"""The random numbers of a sequence: one for each output token, by counting instead of by state.

The number for output token *i* is a hash of (seed, i), so it is the same in any batch, on any
device, and when a preempted sequence comes back; no generator is shared or advanced.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: the step of SplitMix64."""


def uniform(seed: int, index: int) -> float:
    """Return the number of output token *index*: a multiple of 2^-52 in [0, 1).

    It is element *index* of the SplitMix64 sequence (Steele, Lea, Flood 2014) that starts from the
    hashed seed; hashing keeps the sequences of neighbouring seeds apart.
    """
    state = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((state + (index + 1) * _GOLDEN) & _MASK) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
