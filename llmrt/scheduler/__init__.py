"""WHAT runs next: pure Python; no torch, no processes, no clock."""
