"""Snapshots: restorable in-run state. The RAM tier stands in ram.py, the disk tier in disk.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sentinel.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """What attach(snapshots=...) takes.

    Attributes:
        ram: keep snapshots in host memory: a rollback then takes milliseconds.
        disk: write some of them to run_dir too, in the background; the policy says which
            (snapshots.disk_at, disk_every). They outlive the process.
        memory_share: most of the free host memory that one more snapshot may take, 0 to 1.
        pin: page-locked memory for CUDA tensors: faster copies, but not swappable.
        disk_keep: newest healthy ones kept on disk, besides those a rollback may still use.
        disk_share: most of the free disk space that one more snapshot may take, 0 to 1.
        disk_bytes: most that a run's snapshots may take together; None: no bound of its own.
        adopt: your own checkpoints are the disk tier and sentinel writes none: a function that is
            given the path of one and puts it back. Say session.checkpointed(path) after saving.
    """

    ram: bool = True
    disk: bool = True
    memory_share: float = 0.5
    pin: bool = True
    disk_keep: int = 4
    disk_share: float = 0.5
    disk_bytes: int | None = None
    adopt: Callable[[str], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("ram", "disk", "pin"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"snapshots.{name} must be True or False, got {getattr(self, name)!r}"
                )
        for name, kinds, what in (
            ("memory_share", int | float, "a number"),
            ("disk_share", int | float, "a number"),
            ("disk_keep", int, "a whole number"),
            ("disk_bytes", int | None, "a whole number or None"),
        ):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ConfigError(f"snapshots.{name} must be {what}, got {value!r}")
        if self.adopt is not None and not callable(self.adopt):
            raise ConfigError(
                f"snapshots.adopt must be a function that loads a checkpoint, got {self.adopt!r}"
            )
        for name in ("memory_share", "disk_share"):
            share = getattr(self, name)
            if not 0.0 < share <= 1.0:
                raise ConfigError(
                    f"snapshots.{name} must lie above 0 and be at most 1, got {share}"
                )
        if self.disk_keep < 1:
            raise ConfigError(
                f"snapshots.disk_keep must be at least 1, got {self.disk_keep}; to write nothing "
                "to disk, use Snapshots(disk=False)"
            )
        if self.disk_bytes is not None and self.disk_bytes < 0:
            raise ConfigError(
                f"snapshots.disk_bytes must be at least 0, got {self.disk_bytes}; leave it out for "
                "no bound"
            )


__all__ = ["Snapshots"]
