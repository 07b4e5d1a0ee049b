"""Keep an interrupt from losing what was just measured."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Puts Ctrl-C and SIGTERM off while something must not be cut short.

    Between `hold` and the end of the `scope` around it the first signal is only noted and raised
    as KeyboardInterrupt at the end of the scope; a second one is raised at once. Signals that are
    ignored stay so, and off the main thread, where none arrives, nothing happens.
    """

    def __init__(self) -> None:
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int] = {}
        self._came = False

    def hold(self) -> None:
        """From here on, put the first signal off."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._came = False
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None and handler != signal.SIG_IGN:
                self._before[number] = handler
                signal.signal(number, self._note)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Where a hold ends.

        Raises:
            KeyboardInterrupt: a signal came during the hold, and nothing else went wrong.
        """
        came = False
        try:
            yield
        finally:
            came = self.release()
        if came:
            raise KeyboardInterrupt

    def release(self) -> bool:
        """End a hold; returns whether a signal came during it."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        came, self._came = self._came, False
        return came

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
