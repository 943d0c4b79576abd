"""The tables: runs, incidents, executed decisions and their marks, people's commands, the audit.

    with Session(engine) as session: session.scalars(select(Command).where(Command.run == "r7"))

Series are not here: they lie beside the database in the trace format. What is here can be asked for
across runs and outlives retention of the series.

Units:   *_at are Unix seconds of the sidecar's clock; steps are attempted optimizer steps.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAME = 128  # characters of a run id, an idempotency key
_BIG = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up only INTEGER keys


class Base(DeclarativeBase):
    """All tables."""

    type_annotation_map = {float: Double, dict[str, Any]: JSON, list[Any]: JSON}  # noqa: RUF012


class RunRow(Base):
    """One run, as it was last seen.

    Attributes:
        fence: of the present writer; outlives the sidecar, so that a replaced process stays out.
        json: a trainer without an engine: its state is recomputed from the series.
        session: which that trainer carries, when it writes alone; "" when it does not.
    """

    __tablename__ = "run"

    name: Mapped[str] = mapped_column(String(NAME), primary_key=True)
    incarnation: Mapped[str] = mapped_column(String(NAME))
    fence: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))
    engine_version: Mapped[int]
    policy: Mapped[bytes]
    reason: Mapped[str] = mapped_column(Text, default="")
    json: Mapped[bool] = mapped_column(default=False)
    session: Mapped[str] = mapped_column(String(64), default="", server_default="")
    layers: Mapped[list[Any]] = mapped_column(default=list)
    info: Mapped[dict[str, Any]] = mapped_column(default=dict)
    refused: Mapped[list[Any]] = mapped_column(default=list)
    registered_at: Mapped[float]
    heard_at: Mapped[float]
    ended_at: Mapped[float | None]
    last_step: Mapped[int | None] = mapped_column(BigInteger)


class IncidentRow(Base):
    """One incident of one run, as the engine last told it, and what people did about it."""

    __tablename__ = "incident"
    __table_args__ = (UniqueConstraint("run", "number", "opened"),)

    id: Mapped[int] = mapped_column(_BIG, primary_key=True)
    run: Mapped[str] = mapped_column(String(NAME), index=True)
    number: Mapped[int]
    key: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    severity: Mapped[str] = mapped_column(String(16))
    summary: Mapped[str] = mapped_column(Text)
    opened: Mapped[int] = mapped_column(BigInteger)
    last: Mapped[int] = mapped_column(BigInteger)
    fired: Mapped[int | None] = mapped_column(BigInteger)
    resolved: Mapped[int | None] = mapped_column(BigInteger)
    steps: Mapped[int]
    latched: Mapped[bool]
    layers: Mapped[list[Any]] = mapped_column(default=list)
    actions: Mapped[list[Any]] = mapped_column(default=list)
    opened_at: Mapped[float]
    updated_at: Mapped[float]
    acknowledged_at: Mapped[float | None]
    acknowledged_by: Mapped[str] = mapped_column(String(NAME), default="")
    silenced_until: Mapped[float | None]
    silenced_by: Mapped[str] = mapped_column(String(NAME), default="")


class DecisionRow(Base):
    """One executed action other than PROCEED; a frame has at most one, however often it is sent.

    Attributes:
        action: as the core names it, or `rollback_failed`: decided, and nothing was restored.
        target: of a rollback: what was restored; until that is known, what was decided.
    """

    __tablename__ = "decision"
    __table_args__ = (UniqueConstraint("run", "incarnation", "step", "attempt"),)

    id: Mapped[int] = mapped_column(_BIG, primary_key=True)
    run: Mapped[str] = mapped_column(String(NAME), index=True)
    incarnation: Mapped[str] = mapped_column(String(NAME))
    step: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int]
    action: Mapped[str] = mapped_column(String(16))
    rule: Mapped[str] = mapped_column(String(64))
    reason: Mapped[str] = mapped_column(Text)
    target: Mapped[int | None] = mapped_column(BigInteger)
    source: Mapped[str] = mapped_column(String(16))
    at: Mapped[float]


class MarkRow(Base):
    """An executed action that Grafana is still to be told; gone when it has been."""

    __tablename__ = "mark"
    __table_args__ = (UniqueConstraint("run", "incarnation", "step", "attempt"),)

    id: Mapped[int] = mapped_column(_BIG, primary_key=True)
    run: Mapped[str] = mapped_column(String(NAME))
    incarnation: Mapped[str] = mapped_column(String(NAME))
    step: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int]
    action: Mapped[str] = mapped_column(String(16))
    rule: Mapped[str] = mapped_column(String(64))
    reason: Mapped[str] = mapped_column(Text)
    at: Mapped[float]


class CommandRow(Base):
    """A person's order.

    Attributes:
        argument: {"value": x} for scale_lr, {"target": n} for rollback and ack.
        state: pending, delivered, acknowledged (taken), restoring, superseded, failed or expired.
        key: idempotency key; the same one again is the same order.
        step: at which the trainer carried it out, or could not.
        detail: why it was not simply done, or which snapshot was restored.
    """

    __tablename__ = "command"
    __table_args__ = (
        UniqueConstraint("run", "key"),
        Index("ix_command_open", "run", "state"),
    )

    id: Mapped[str] = mapped_column(String(NAME), primary_key=True)
    run: Mapped[str] = mapped_column(String(NAME))
    key: Mapped[str] = mapped_column(String(NAME))
    kind: Mapped[str] = mapped_column(String(16))
    argument: Mapped[dict[str, Any]] = mapped_column(default=dict)
    actor: Mapped[str] = mapped_column(String(NAME), default="")
    state: Mapped[str] = mapped_column(String(16), default="pending")
    created_at: Mapped[float]
    expires_at: Mapped[float]
    delivered_at: Mapped[float | None]
    acknowledged_at: Mapped[float | None]
    step: Mapped[int | None] = mapped_column(BigInteger)
    detail: Mapped[str] = mapped_column(Text, default="")


class AuditRow(Base):
    """Who asked for what, and whether they got it. Only ever added to."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(_BIG, primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
    actor: Mapped[str] = mapped_column(String(NAME))
    role: Mapped[str] = mapped_column(String(16), default="")
    address: Mapped[str] = mapped_column(String(NAME), default="")
    action: Mapped[str] = mapped_column(String(32))
    run: Mapped[str] = mapped_column(String(NAME), default="")
    outcome: Mapped[str] = mapped_column(String(16))
    detail: Mapped[dict[str, Any]] = mapped_column(default=dict)
