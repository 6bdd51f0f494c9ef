"""Attention over the paged KV cache, behind one protocol."""
