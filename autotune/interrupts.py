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
        self._scoped = False

    @property
    def came(self) -> bool:
        """Whether a signal is put off at the moment."""
        return self._came

    def hold(self) -> None:
        """From here on, put the first signal off; outside of a scope nothing would end that."""
        main = threading.current_thread() is threading.main_thread()
        if not self._scoped or self._before or not main:
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
        self._scoped = True
        try:
            yield
        finally:
            self._scoped = False
            came = self._release()
        if came:
            raise KeyboardInterrupt

    @contextmanager
    def first_ignored(self) -> Iterator[None]:
        """A block in which the first signal is dropped and a second one is raised at once."""
        self._scoped = True
        try:
            self.hold()
            yield
        finally:
            self._scoped = False
            self._release()

    def _release(self) -> bool:
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
