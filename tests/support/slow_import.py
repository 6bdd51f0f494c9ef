"""A module that takes for ever to import."""

from __future__ import annotations

import threading

threading.Event().wait()
