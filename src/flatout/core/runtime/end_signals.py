"""What asks a process to end, beside Ctrl-C."""

from __future__ import annotations

import signal
from typing import Final

END_SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Those of the two that the system has."""
