"""Settings of one sidecar process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sentinel.core.errors import ConfigError
from sentinel.core.policy import Policy
from sentinel.sidecar.grafana import Grafana
from sentinel.sidecar.security import Role

MIN_RUN_BYTES = 16 * 2**20  # less would drop segments as soon as they are closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `sentinel serve` was told.

    Attributes:
        policy: handed to every run that did not choose one of its own; None: nothing is handed.
        token: shared secret of every role; "" for none. Over TCP it then settles who may steer.
        token_files: files of tokens, each with the role that its tokens have; see security.py.
        lost_after_s: a running run that is silent for so long is lost, and may be taken over.
        max_body_bytes: larger requests are refused.
        max_runs: runs in memory; those that have ended make room, then lost ones, oldest first.
        max_layers: layers of one run that get series of their own.
        data_dir: where series and the database are kept; None: nowhere for longer than it runs.
        database: URL of a database server; "" for an SQLite file in data_dir.
        max_run_bytes: what the series of one run may take; its oldest segments make room.
        max_store_bytes: what all series may take; runs that are over make room, oldest first.
        retention_days: series and rows of runs that ended longer ago are deleted.
        audit_days: lines of the audit log that are older are deleted.
        grafana: who tells Grafana of what was done, and keeps the dashboards there; see grafana.py.
        watch: folders of embedded runs (a trainer's run_dir) that are shown too, read-only.
        run_dirs: folders in which the trainers that report here keep their runs.
        verify_every_s: how often each snapshot on disk below all those is read again; 0: never.
        verify_bytes_per_s: at most so fast.
    """

    policy: Policy | None = None
    token: str = ""
    token_files: tuple[tuple[Role, Path], ...] = ()
    lost_after_s: float = 60.0
    max_body_bytes: int = 32 * 2**20
    max_runs: int = 1000
    max_layers: int = 512
    data_dir: Path | None = None
    database: str = ""
    max_run_bytes: int = 2 * 2**30
    max_store_bytes: int = 50 * 2**30
    retention_days: float = 30.0
    audit_days: float = 365.0
    watch: tuple[Path, ...] = ()
    run_dirs: tuple[Path, ...] = ()
    verify_every_s: float = 86_400.0
    verify_bytes_per_s: float = 32.0 * 2**20
    grafana: Grafana | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lost_after_s) and self.lost_after_s > 0):
            raise ConfigError(f"lost_after_s must be above 0, got {self.lost_after_s:g}")
        if not self.retention_days > 0:
            raise ConfigError(f"retention_days must be above 0, got {self.retention_days:g}")
        if not (self.verify_every_s == 0.0 or self.verify_every_s >= 60.0):
            raise ConfigError(
                f"verify_every_s must be 0 or at least 60, got {self.verify_every_s:g}"
            )
        if not self.verify_bytes_per_s >= 2**20:
            raise ConfigError(
                f"verify_bytes_per_s must be at least {2**20} (1 MiB), got "
                f"{self.verify_bytes_per_s:g}"
            )
        if not self.audit_days >= self.retention_days:
            raise ConfigError(
                f"audit_days must be at least retention_days ({self.retention_days:g}), got "
                f"{self.audit_days:g}: the log must say what was asked of a run that is still kept"
            )
        for name in ("max_run_bytes", "max_store_bytes"):
            if getattr(self, name) < MIN_RUN_BYTES:
                raise ConfigError(
                    f"{name} must be at least {MIN_RUN_BYTES} (16 MiB), got {getattr(self, name)}"
                )
        for name in ("max_body_bytes", "max_runs", "max_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
