"""What a signal may raise between any two lines of the main thread."""

from __future__ import annotations

INTERRUPTIONS = (KeyboardInterrupt, SystemExit)
"""Ctrl-C, and `sys.exit()` in a handler of the user's, as for SIGTERM: the program is to go on or
to end, but not to wait."""
