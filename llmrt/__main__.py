"""`python -m llmrt` is the program `llmrt`."""

from __future__ import annotations

import sys

from llmrt.cli import main

if __name__ == "__main__":
    sys.exit(main())
