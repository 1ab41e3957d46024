# SPDX-License-Identifier: Apache-2.0
"""Batches made ahead of the step that wants them, in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Made = TypeVar("Made")

_DEPTH = 2


class Prefetcher(Generic[Made]):
    """Calls ``make(step)`` for each of ``steps`` in a thread, up to two steps ahead; ``next`` hands the results out.

    Args:
        make: what assembles a step's batches; runs in the thread.
        steps: the steps, in order.

    Attributes:
        seconds_waited: how long ``next`` has waited in all.
    """

    def __init__(self, make: Callable[[int], Made], steps: Iterable[int]) -> None:
        self.seconds_waited = 0.0
        self._ready: queue.Queue[Made | BaseException] = queue.Queue(_DEPTH)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make, steps), name="prefetch", daemon=True)
        self._thread.start()

    def next(self) -> Made:
        """The next step's batches.

        Raises:
            StopIteration: there are no more steps.
            BaseException: whatever ``make`` raised for this step.
        """
        started = time.perf_counter()
        made = self._ready.get()
        self.seconds_waited += time.perf_counter() - started
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        """End the thread; what it has made is dropped."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)  # it may be waiting for room
            except queue.Empty:
                continue

    def _run(self, make: Callable[[int], Made], steps: Iterable[int]) -> None:
        try:
            for step in steps:
                if self._closed.is_set():
                    return
                self._ready.put(make(step))
        except BaseException as error:  # it belongs to whoever asks for the batch
            self._ready.put(error)
        else:
            self._ready.put(StopIteration())
