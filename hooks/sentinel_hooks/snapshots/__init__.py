"""Snapshots: restorable in-run state. The RAM tier stands in ram.py."""

from __future__ import annotations

from dataclasses import dataclass

from sentinel.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """What attach(snapshots=...) takes.

    Attributes:
        ram: keep snapshots in host memory; without them there is nothing to roll back to.
        memory_share: most of the free host memory that one more snapshot may take, 0 to 1.
        pin: page-locked memory for CUDA tensors: faster copies, but not swappable.
    """

    ram: bool = True
    memory_share: float = 0.5
    pin: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_share <= 1.0:
            raise ConfigError(
                f"snapshots.memory_share must lie above 0 and be at most 1, got {self.memory_share}"
            )


__all__ = ["Snapshots"]
