"""Whoever talks to Grafana, as the sidecar sees it: ports that the command line fills.

    settings.grafana = Grafana(writer, keeper, every_s=600.0)

Purity:  no I/O; what is behind the ports has threads of its own, and nothing of it ever waits.
Errors:  Grafana raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sentinel.core.errors import ConfigError


class Writer(Protocol):
    """What is needed of dashboards.annotate.AnnotationWriter."""

    written: int
    dropped: int
    trouble: str
    on_done: Callable[[Any], None]

    @property
    def waiting(self) -> int: ...
    @property
    def room(self) -> int: ...
    def decided(
        self, run: str, row: Mapping[str, Any], *, key: Hashable = None, again: bool = False
    ) -> None: ...
    def close(self) -> None: ...


class Keeper(Protocol):
    """What is needed of dashboards.reconcile.Reconciler."""

    @property
    def up(self) -> bool | None: ...
    @property
    def left_alone(self) -> Mapping[str, str]: ...
    @property
    def writes(self) -> int: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    def begin(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Grafana:
    """The Grafana that this sidecar talks to; nothing of it ever waits.

    Attributes:
        keeper: puts dashboards back; None: marks only.
        every_s: between two looks of the keeper.
    """

    writer: Writer
    keeper: Keeper | None = None
    every_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.every_s >= 1.0:
            raise ConfigError(f"grafana every_s must be at least 1 s, got {self.every_s:g}")
