"""The one place where sentinel's own errors end: caught, logged once, counted, and gone past.

    guard = Guard("r7", on_error=...)
    guard.run("gate", body, argument)      body's answer, or None when it failed

Every hook body runs through `Guard.run`. What fails `LIMIT` times in a row at one place does not
get better: the guard then calls `on_broken`, and the session switches itself off.

Errors:  only Exception is caught: KeyboardInterrupt and SystemExit are the user's. What passes
         through on purpose (an exception of the user's own closure, TrainingHalted) is raised
         outside the guard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

LIMIT = 3  # failures in a row at one place after which it is given up


class Guard:
    """Runs hook bodies so that none of their errors reaches the training loop."""

    def __init__(
        self,
        run: str,
        *,
        on_error: Callable[[str], None] | None = None,
        on_broken: Callable[[str], None] | None = None,
    ) -> None:
        """Guard the hooks of `run`.

        Args:
            on_error: told the place of each error; may not raise.
            on_broken: told the place that failed LIMIT times in a row.
        """
        self._run = run
        self._on_error = on_error
        self._on_broken = on_broken
        self._in_a_row: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.last = ""

    def run(
        self, where: str, body: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _R | None:
        """`body(*args, **kwargs)`, or None if it raised."""
        try:
            result = body(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  fail-open is the point of this file
            self.note(where, error)
            return None
        if self._in_a_row:
            self._in_a_row.pop(where, None)
        return result

    def note(self, where: str, error: Exception) -> None:
        """Count an error that was caught at `where`."""
        first = where not in self.counts
        self.counts[where] = self.counts.get(where, 0) + 1
        self._in_a_row[where] = self._in_a_row.get(where, 0) + 1
        self.last = f"{where}: {type(error).__name__}: {error}"
        if first:
            logger.error(
                "sentinel failed inside, training goes on run=%s where=%s error=%s",
                self._run,
                where,
                self.last,
                exc_info=error,
            )
        try:
            if self._on_error is not None:
                self._on_error(where)
            if self._in_a_row[where] >= LIMIT and self._on_broken is not None:
                self._on_broken(where)
        except Exception:
            logger.exception("sentinel failed while noting an error run=%s", self._run)
