"""`llmrt bench`: workloads of fixed size, run on an engine, one line of numbers for each."""
