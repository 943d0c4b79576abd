"""Errors raised by the core.

* SentinelError
  - ConfigError      a policy, rule or detector setting makes no sense
  - ProtocolError    a message does not follow the wire protocol
  - TraceError       a recorded run cannot be read
  - StateError       the engine was called out of order
"""

from __future__ import annotations


class SentinelError(Exception):
    """Base of every error sentinel raises on purpose."""


class ConfigError(SentinelError, ValueError):
    """A setting makes no sense; the message names the field, the bound and the value."""


class ProtocolError(SentinelError, ValueError):
    """A message does not follow the wire protocol; the message says what was expected."""


class TraceError(SentinelError, ValueError):
    """A recorded run cannot be read; the message names the file and the reason."""


class StateError(SentinelError, RuntimeError):
    """The engine was called out of order, for example apply() before decide()."""
