"""What a failure of the database says: whether it will pass, and its words for people.

    passes(error)          True: it is the database's (gone, full, locked, read-only): try again
                           False: it is of what was asked (a key twice, too long): never again
    read_only(error)       the file or its disk is, to SQLite
    gone(error)            nobody answers: whoever asks next need not wait to hear the same
    said(error)            one line, without the statement and its values

A write that fails for what it is would fail for ever and hold up all that come after it. Anything
else is the database's own trouble, whatever it is: the write is sound, and somebody mends the disk.

Source:  sqlite3's result codes (sqlite.org/rescode.html); PostgreSQL's SQLSTATE classes (appendix A
         of its manual).
"""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

# SQLITE_ERROR (the statement), _TOOBIG, _CONSTRAINT, _MISMATCH, _MISUSE, _RANGE.
_OF_THE_WRITE_SQLITE = frozenset({1, 18, 19, 20, 21, 25})
# Cardinality, data, constraints, syntax and names, limits of the server, what it does not do.
_OF_THE_WRITE = ("0A", "21", "22", "23", "42", "54")
_READONLY_SQLITE = 8
_FORBIDDEN = "42501"  # a right was taken away: it can be given back
_CLASSES = (IntegrityError, DataError, ProgrammingError, NotSupportedError)


def passes(error: BaseException) -> bool:
    """Whether the same may succeed later."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (OSError, PoolTimeoutError))
    if error.connection_invalidated:
        return True
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", None)
        if code is not None:
            return (code & 0xFF) not in _OF_THE_WRITE_SQLITE
        return isinstance(cause, sqlite3.OperationalError)
    state = getattr(cause, "sqlstate", None)
    if state:
        return state == _FORBIDDEN or not state.startswith(_OF_THE_WRITE)
    return not isinstance(error, _CLASSES)


def gone(error: BaseException) -> bool:
    """Whether there is no server to talk to."""
    if not isinstance(error, DBAPIError) or isinstance(error.orig, sqlite3.Error):
        return False
    state = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or (passes(error) and not state)


def read_only(error: BaseException) -> bool:
    """Whether SQLite could not write where it could read."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF == _READONLY_SQLITE


def said(error: BaseException) -> str:
    """What the driver says."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split())[:300] or type(error).__name__
