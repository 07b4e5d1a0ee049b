"""Ask a proposer in a thread of its own, so that a search never waits for one that hangs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from kvtune.autotune.explore.base import Observation, Proposer

LIMIT_S = 10.0
"""How long an answer may take. With a server that starts in seconds, a search should not wait as
long for what to start next."""

SIMULATED_S = 4.0
"""How much of that may go into simulations: some forty points, and as many more each time it is
asked. The rest is for what comes before and after them on a slow machine."""

T = TypeVar("T")
Task = tuple["Future[Any]", Callable[[Proposer], Any]]


class TooLate(Exception):
    """There was no answer in time."""


class Asking:
    """Passes what is asked on to `proposer`, in order, and waits `limit_s` for each answer at most.

    With what takes longer the proposer goes on, and until it is done nobody waits for more.
    """

    def __init__(self, proposer: Proposer, *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._late: Future[Any] | None = None
        # Nobody waits for a thread that hangs, not even the end of the program.
        Thread(target=_answer, args=(proposer, self._tasks), daemon=True).start()

    def ask(self, question: Callable[[Proposer], T]) -> T:
        """The answer to a question.

        Raises:
            TooLate: it took too long.
        """
        answer: Future[T] = Future()
        is_busy = self._late is not None and not self._late.done()
        if not is_busy:
            self._tasks.put((answer, question))
        try:
            return answer.result(0 if is_busy else self._limit_s)
        except TimeoutError as late:
            self._late = self._late if is_busy else answer
            raise TooLate(f"no answer in {self._limit_s:g} s") from late

    def tell(self, observation: Observation) -> None:
        """Tell the proposer what was measured before it is asked again; nobody waits for it."""
        self._tasks.put((Future(), lambda proposer: proposer.observe(observation)))

    def end(self) -> None:
        """Let the thread end once it has answered."""
        self._tasks.put(None)


def _answer(proposer: Proposer, tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        answer, question = task
        try:
            answer.set_result(question(proposer))
        except BaseException as error:  # It is raised again where it was asked.
            answer.set_exception(error)
