"""Does training end because something went wrong?

    ending = Ending()             attach()
    ending.is_a_crash()           detach(): an error is on its way out of the loop
    crashed(error)                this one ends training, and nobody wanted it to

Somebody may attach while dealing with an earlier error (a restart within one process): that one is
known, and no crash of this run. An interrupt, and an exit with a good code, are wished for.

Errors:  none. No error is kept: it would keep its frames, and their tensors, alive.
"""

from __future__ import annotations

import sys


class Ending:
    """Tells an error of this run from the one that was being dealt with when it began."""

    def __init__(self) -> None:
        self._handled = recognised(sys.exc_info()[1])

    def is_a_crash(self) -> bool:
        """Asked from where training ends: is it by an error?"""
        error = sys.exc_info()[1]
        return crashed(error) and recognised(error) != self._handled


def crashed(error: BaseException | None) -> bool:
    """It ends training, and not because somebody wanted it to end."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    wanted = KeyboardInterrupt | StopIteration | GeneratorExit
    return error is not None and not isinstance(error, wanted)


def recognised(error: BaseException | None) -> tuple[object, ...] | None:
    """What tells an error from others.

    Its id alone does not: once it is gone, the next error may lie at the same address.
    """
    if error is None:
        return None
    trace = error.__traceback__
    where = (None, 0) if trace is None else (trace.tb_frame.f_code, trace.tb_lineno)
    return (id(error), type(error), *where)
