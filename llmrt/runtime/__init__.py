"""WHERE it lives: processes and channels; knows no LLM and no torch."""
