"""The policy: every number that settles a decision, as one validated value.

    Policy.load("default")            a shipped policy by name
    Policy.load("path/to/mine.toml")  a file; what it leaves out comes from `default`
    Policy.parse(text, name)          the same from text

Fields and their defaults stand in the dataclasses below: this file is the table of design
defaults, the TOML files only differ from it. A setting that is unknown, of the wrong type or out
of bounds raises ConfigError with the field, the bound, the value and the way out.

Units:   steps, unless the name says otherwise; margins and drifts in ln(nats).
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

from sentinel.core import bounds
from sentinel.core.detectors.attention_logit import AttentionLogitConfig
from sentinel.core.detectors.depth import DepthConfig
from sentinel.core.detectors.grad_norm import NormConfig
from sentinel.core.detectors.layer_band import BandConfig
from sentinel.core.detectors.layer_outlier import OutlierConfig
from sentinel.core.detectors.level_shift import ShiftConfig
from sentinel.core.detectors.loss_scale import ScaleConfig
from sentinel.core.detectors.loss_shape import ShapeConfig
from sentinel.core.detectors.norm_band import NormBandConfig
from sentinel.core.detectors.norm_trend import TrendConfig
from sentinel.core.detectors.resources import ResourceConfig
from sentinel.core.detectors.spike import SpikeConfig
from sentinel.core.detectors.stale_grads import StaleConfig
from sentinel.core.detectors.throughput import PaceConfig
from sentinel.core.detectors.update_ratio import UpdateRatioConfig
from sentinel.core.errors import ConfigError
from sentinel.core.types import Mode, Severity

SHIPPED = ("default", "observe", "rl")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleConfig:
    """How one rule is carried out.

    Attributes:
        mode: act, observe (decide and note only) or off.
        for_steps: how long its condition must hold before it fires; `for` in TOML.
        cooldown: steps after one of its actions in which it stays quiet.
        budget: most actions within `budget_window` steps; 0 means no bound of its own.
    """

    mode: Mode = Mode.ACT
    for_steps: int = 1
    cooldown: int = 0
    budget: int = 0
    budget_window: int = 2000
    severity: Severity = Severity.WARNING

    def check(self, where: str) -> None:
        """Raise ConfigError when a field makes no sense; `where` is the rule's TOML path."""
        bounds.check(
            where,
            **{
                "for": (self.for_steps, 1, 10_000),
                "cooldown": (self.cooldown, 0, 10_000_000),
                "budget": (self.budget, 0, 1_000_000),
                "budget_window": (self.budget_window, 1, 10_000_000),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules, in the order of their precedence within one action.

    From level_shift on they are flags: advice, never an action; their cooldown is how long one
    layer is not flagged again, and how long after the last one the incident resolves. Two are off
    by default: small batches swing, and long runs stand still, in perfect health.

    `for` of loss_spike counts spike steps of one incident, that of nonfinite_loss counts
    non-finite losses in a row; all others count steps in a row in which the condition held (flags
    that are looked at more rarely: see core/advice.py).
    """

    nonfinite_params: RuleConfig = RuleConfig(cooldown=16, severity=Severity.CRITICAL)
    nonfinite_loss: RuleConfig = RuleConfig(for_steps=3, cooldown=16, severity=Severity.CRITICAL)
    loss_spike: RuleConfig = RuleConfig(for_steps=4, cooldown=16, severity=Severity.CRITICAL)
    skip_bound: RuleConfig = RuleConfig(cooldown=16, severity=Severity.CRITICAL)
    nonfinite_grad: RuleConfig = RuleConfig()
    grad_norm: RuleConfig = RuleConfig()
    loss_outlier: RuleConfig = RuleConfig()
    level_shift: RuleConfig = RuleConfig(cooldown=64)
    attention_logit: RuleConfig = RuleConfig(cooldown=500)
    update_ratio: RuleConfig = RuleConfig(for_steps=3, cooldown=500)
    norm_band: RuleConfig = RuleConfig(for_steps=16, cooldown=500, severity=Severity.INFO)
    layer_band: RuleConfig = RuleConfig(cooldown=500, severity=Severity.INFO)
    layer_outlier: RuleConfig = RuleConfig(for_steps=3, cooldown=500, severity=Severity.INFO)
    depth: RuleConfig = RuleConfig(for_steps=2, cooldown=500)
    residual_gain: RuleConfig = RuleConfig(for_steps=2, cooldown=500, severity=Severity.INFO)
    residual_mixing: RuleConfig = RuleConfig(for_steps=32, cooldown=500)
    collapse: RuleConfig = RuleConfig(for_steps=20, cooldown=500)
    norm_trend: RuleConfig = RuleConfig(cooldown=500)
    rising_together: RuleConfig = RuleConfig(for_steps=32, cooldown=500)
    stale_grads: RuleConfig = RuleConfig(cooldown=500)
    loss_swing: RuleConfig = RuleConfig(mode=Mode.OFF, for_steps=32, cooldown=500)
    loss_period: RuleConfig = RuleConfig(for_steps=32, cooldown=500)
    loss_plateau: RuleConfig = RuleConfig(mode=Mode.OFF, cooldown=500)
    loss_scale: RuleConfig = RuleConfig(cooldown=500)
    clip_pressure: RuleConfig = RuleConfig(for_steps=64, cooldown=500)
    headroom: RuleConfig = RuleConfig(for_steps=32, cooldown=500)
    throughput: RuleConfig = RuleConfig(for_steps=32, cooldown=500)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipConfig:
    """Bounds on skipping: a regime in which every step would be skipped must end."""

    in_a_row: int = 20
    in_window: int = 50
    window: int = 500
    data: int = 20  # in one incident, on the canary's verdict "data"; then let through

    def __post_init__(self) -> None:
        bounds.check(
            "skip",
            in_a_row=(self.in_a_row, 1, 10_000),
            in_window=(self.in_window, 1, 100_000),
            window=(self.window, 1, 1_000_000),
            data=(self.data, 1, 10_000),
        )
        if self.in_window > self.window:
            raise ConfigError(
                f"skip.in_window must be at most skip.window ({self.window} steps), "
                f"got {self.in_window}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackConfig:
    """The ladder: how often, how far back, and when it may be climbed again.

    Attributes:
        budget: most rollbacks within `window` steps; then the engine stops acting and pages.
        quiet: quiet steps after a rollback before spike steps climb the ladder again.
        relapse: a relapse sooner than this many steps after the last rollback takes a strictly
            older snapshot than that one took; later, snapshots confirmed since count again.
        cool: cool steps in a row that end an incident.
        halt_when_spent: stop the run, instead of only paging, when the budget is spent.
    """

    budget: int = 3
    window: int = 2000
    quiet: int = 16
    relapse: int = 500
    cool: int = 2
    halt_when_spent: bool = False

    def __post_init__(self) -> None:
        bounds.check(
            "rollback",
            budget=(self.budget, 0, 1000),
            window=(self.window, 1, 10_000_000),
            quiet=(self.quiet, 0, 1_000_000),
            relapse=(self.relapse, 0, 10_000_000),
            cool=(self.cool, 1, 1000),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LrCutConfig:
    """The learning rate after a rollback; `again` holds from the second within the window.

    factor = max(floor, cut ** n) for the n-th rollback within rollback.window.
    """

    cut: float = 0.5
    floor: float = 0.1
    hold: int = 16
    rewarm: int = 50
    again_hold: int = 50
    again_rewarm: int = 200

    def __post_init__(self) -> None:
        bounds.check(
            "lr",
            cut=(self.cut, 0.001, 1.0),
            floor=(self.floor, 0.0, 1.0),
            hold=(self.hold, 0, 1_000_000),
            rewarm=(self.rewarm, 0, 1_000_000),
            again_hold=(self.again_hold, 0, 1_000_000),
            again_rewarm=(self.again_rewarm, 0, 1_000_000),
        )


class CanaryMode(StrEnum):
    """Whether an incident is judged before weights are thrown away."""

    ON = "on"
    OFF = "off"  # the literal rule: roll back at the 4th spike step


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryConfig:
    """The canary: a quiet batch at least `age` steps old; `margin` in ln(nats)."""

    mode: CanaryMode = CanaryMode.ON
    age: int = 10
    margin: float = 0.05

    def __post_init__(self) -> None:
        bounds.check("canary", age=(self.age, 1, 10_000), margin=(self.margin, 0.0, 10.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """When snapshots are taken and which are kept.

    Attributes:
        ram_every: steps between RAM snapshots.
        disk_at: the first steps from which on the next snapshot is written to disk too; rising.
        disk_every: after them, steps between snapshots on disk.
        confirm: quiet steps after which a candidate is healthy.
        keep: newest healthy ones kept, besides one at least `older_by` steps before the newest.
    """

    ram_every: int = 50
    disk_at: tuple[int, ...] = (50, 100, 200)
    disk_every: int = 500
    confirm: int = 32
    keep: int = 2
    older_by: int = 500

    def __post_init__(self) -> None:
        bounds.check(
            "snapshots",
            ram_every=(self.ram_every, 1, 10_000_000),
            disk_every=(self.disk_every, 1, 10_000_000),
            confirm=(self.confirm, 1, 1_000_000),
            keep=(self.keep, 1, 100),
            older_by=(self.older_by, 1, 10_000_000),
        )
        if any(a < 1 for a in self.disk_at) or sorted(set(self.disk_at)) != list(self.disk_at):
            raise ConfigError(
                "snapshots.disk_at must be steps of at least 1, each greater than the one before, "
                f"got {list(self.disk_at)}; leave it empty ([]) to have snapshots.disk_every alone"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Ordered rules, detector settings, bounds and mode."""

    name: str = "default"
    mode: Mode = Mode.ACT
    report_after: int = 1000  # observing: a summary of what would have been done, this often
    rules: Rules = Rules()
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    level_shift: ShiftConfig = field(default_factory=ShiftConfig)
    grad_norm: NormConfig = field(default_factory=NormConfig)
    attention_logit: AttentionLogitConfig = field(default_factory=AttentionLogitConfig)
    update_ratio: UpdateRatioConfig = field(default_factory=UpdateRatioConfig)
    norm_band: NormBandConfig = field(default_factory=NormBandConfig)
    layer_band: BandConfig = field(default_factory=BandConfig)
    layer_outlier: OutlierConfig = field(default_factory=OutlierConfig)
    depth: DepthConfig = field(default_factory=DepthConfig)
    norm_trend: TrendConfig = field(default_factory=TrendConfig)
    stale_grads: StaleConfig = field(default_factory=StaleConfig)
    loss_shape: ShapeConfig = field(default_factory=ShapeConfig)
    loss_scale: ScaleConfig = field(default_factory=ScaleConfig)
    throughput: PaceConfig = field(default_factory=PaceConfig)
    resources: ResourceConfig = field(default_factory=ResourceConfig)
    skip: SkipConfig = SkipConfig()
    rollback: RollbackConfig = RollbackConfig()
    lr: LrCutConfig = LrCutConfig()
    canary: CanaryConfig = CanaryConfig()
    snapshots: SnapshotConfig = SnapshotConfig()

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self.rules):
            rule: RuleConfig = getattr(self.rules, f.name)
            rule.check(f"rules.{f.name}")
        bounds.check("policy", report_after=(self.report_after, 1, 10_000_000))
        if self.mode is Mode.OFF:
            raise ConfigError("mode must be 'act' or 'observe', got 'off'; to stop, use detach()")

    @classmethod
    def load(cls, source: str | Path | Policy) -> Policy:
        """A shipped policy by name, a TOML file by path, or a Policy as it is.

        Raises:
            ConfigError: no such policy, unreadable file, or a setting that makes no sense.
        """
        if isinstance(source, Policy):
            return source
        if isinstance(source, str) and source in SHIPPED:
            text = resources.files("sentinel.core").joinpath(f"policies/{source}.toml").read_text()
            return cls.parse(text, source)
        if not isinstance(source, str | Path):
            raise ConfigError(
                f"policy must be one of {', '.join(SHIPPED)}, the path of a TOML file or a Policy, "
                f"got {source!r}; a table becomes one by Policy.from_dict()"
            )
        path = Path(source)
        try:
            text = path.read_text(encoding="utf-8-sig")  # some editors begin with a BOM
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
            raise ConfigError(
                f"policy must be one of {', '.join(SHIPPED)} or a readable TOML file, "
                f"got {str(source)!r} ({error})"
            ) from error
        return cls.parse(text, path.stem)

    @classmethod
    def parse(cls, text: str, name: str = "custom") -> Policy:
        """Build a policy from TOML text; settings that it leaves out keep their default.

        Raises:
            ConfigError: the text is no TOML, or a setting makes no sense.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"policy {name!r} is not valid TOML: {error}") from error
        data.setdefault("name", name)
        return typing.cast(Policy, _build(cls, data, ""))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """The inverse of to_dict().

        Raises:
            ConfigError: a setting makes no sense.
        """
        return typing.cast(Policy, _build(cls, data, ""))

    def with_mode(self, mode: Mode | str | None) -> Policy:
        """The same policy in another mode; None leaves it alone."""
        if mode is None:
            return self
        try:
            chosen = Mode(mode)
        except ValueError:
            raise ConfigError(f"mode must be 'act' or 'observe', got {mode!r}") from None
        return dataclasses.replace(self, mode=chosen)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts: what TOML would hold, every default spelled out."""
        return typing.cast("dict[str, Any]", _plain(self))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            ("for" if f.name == "for_steps" else f.name): _plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, StrEnum) else value


def _build(kind: type[Any], data: Mapping[str, Any], where: str) -> Any:
    """A dataclass of `kind` from a TOML table, checking names and types."""
    hints = typing.get_type_hints(kind)
    known = {("for" if f.name == "for_steps" else f.name): f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    default = _default_of(kind, where)
    for key, value in data.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            raise ConfigError(
                f"{path} is not a setting; {where or 'the policy'} has: {', '.join(sorted(known))}"
            )
        field_ = known[key]
        values[field_.name] = _value(hints[field_.name], value, path)
    return dataclasses.replace(default, **values)


def _default_of(kind: type[Any], where: str) -> Any:
    """The value that a table starts from: each rule has defaults of its own."""
    if kind is RuleConfig:
        return getattr(Rules(), where.rsplit(".", 1)[-1])
    return kind()


def _value(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be a table, got {value!r}")
        return _build(typing.cast("type[Any]", hint), value, path)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        allowed = [str(v) for v in hint]
        if value not in allowed:
            raise ConfigError(f"{path} must be one of {', '.join(allowed)}, got {value!r}")
        return hint(value)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        return _value(options[0], value, path)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{path} must be a list, got {value!r}")
        item = typing.get_args(hint)[0]
        return tuple(_value(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    raise ConfigError(f"{path} must be {names.get(hint, str(hint))}, got {value!r}")
