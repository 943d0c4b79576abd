"""Settings of one sidecar process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy
from sentinel.sidecar.security import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `sentinel serve` was told.

    Attributes:
        policy: handed to every run that did not choose one of its own; None: nothing is handed.
        token: shared secret of every role; "" for none. Over TCP it then settles who may steer.
        token_files: files of tokens, each with the role that its tokens have; see security.py.
        lost_after_s: a running run that is silent for so long is lost, and may be taken over.
        max_body_bytes: larger requests are refused.
        max_runs: runs kept; finished and lost ones make room, oldest first.
        max_layers: layers of one run that get series of their own.
    """

    policy: Policy | None = None
    token: str = ""
    token_files: tuple[tuple[Role, Path], ...] = ()
    lost_after_s: float = 60.0
    max_body_bytes: int = 32 * 2**20
    max_runs: int = 1000
    max_layers: int = 512

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lost_after_s) and self.lost_after_s > 0):
            raise ConfigError(f"lost_after_s must be above 0, got {self.lost_after_s:g}")
        for name in ("max_body_bytes", "max_runs", "max_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
