"""A request that cannot be served as asked.

    raise RefusedError("unknown_run", "run 'r7' is not registered here: PUT /v1/runs/r7", 404)

The routes turn it into a Refused message or {"code", "detail"}.
"""

from __future__ import annotations

from sentinel.core.errors import SentinelError


class RefusedError(SentinelError):
    """`code` (one of openapi.CODES) and `status` go into the answer; `detail` has the way out."""

    def __init__(self, code: str, detail: str, status: int = 409) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = status
