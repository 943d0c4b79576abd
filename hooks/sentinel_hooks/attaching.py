"""attach(): check what was given, find the run's id, policy and sidecar, and start a Session.

    session = sentinel.attach(model=model, optimizer=optimizer, lr_scheduler=s, grad_scaler=g)

A run id that was given (argument, $SENTINEL_RUN_ID, torchrun's --rdzv-id) names a run that may have
begun in another process: its ledger is found in run_dir/<id>. Every other attach is a new run.

Errors:  AttachError or ConfigError, before anything of the user's was touched.
"""

from __future__ import annotations

import datetime as dt
import functools
import gc
import inspect
import logging
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from sentinel.core.errors import SentinelError, TraceError
from sentinel.core.exposition import Textfile
from sentinel.core.policy import Policy
from sentinel.core.types import Mode
from sentinel.traces import ledger
from sentinel.traces import snapshots as stored
from sentinel.traces.places import RUN_DIR_VARIABLE
from sentinel.traces.places import run_dir as default_run_dir
from sentinel.wire import codec, messages
from sentinel_hooks import adapters, late, outlets, waiting
from sentinel_hooks.adapters import plain
from sentinel_hooks.errors import AttachError, StillHalted
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.ledger_file import Claim, Keeper, claimed_here
from sentinel_hooks.link import Decide, EmbeddedLink, Link, make_link
from sentinel_hooks.parts.assembly import Given
from sentinel_hooks.parts.pausing import PAUSE_FILE
from sentinel_hooks.probes.together import part_names
from sentinel_hooks.ranks import meeting
from sentinel_hooks.ranks.agreement import Agreement, Layout
from sentinel_hooks.ranks.council import Council
from sentinel_hooks.ranks.group import Group, LostError
from sentinel_hooks.session import Session, is_attached
from sentinel_hooks.signals import Signals
from sentinel_hooks.snapshots import Snapshots
from sentinel_hooks.status import BlindSpot
from sentinel_hooks.target import Target

logger = logging.getLogger(__name__)

RUN_ID_VARIABLE = "SENTINEL_RUN_ID"
LAUNCHER_VARIABLE = "TORCHELASTIC_RUN_ID"  # "none" unless torchrun was given --rdzv-id
RUN_ID_BYTES = 200  # a file name has room for 255, and ours append to it


def attach(
    trainer: Any = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    grad_scaler: Any = None,
    loss_fn: Any = None,
    policy: str | Path | Policy = "default",
    mode: Mode | str | None = None,
    sidecar: str | None = "auto",
    decide: str | None = None,
    run_id: str | None = None,
    run_dir: str | Path | None = None,
    record: bool = True,
    signals: Signals | None = None,
    snapshots: Snapshots | None = None,
    extra_state: Sequence[Any] = (),
    batch_id: Callable[[], str] | None = None,
    norm_fn: Callable[[], Any] | None = None,
    webhook: str | None = None,
    reads: str = "now",
) -> Session:
    """Watch a training loop, and undo the step that breaks it.

    Args:
        trainer: an HF or Lightning Trainer, an accelerate.Accelerator, or one that an adapter of
            yours knows (docs/adapters.md). Then none of the objects below is given, and what comes
            back is a TrainerSession: the same face, alive while training runs.
        model: the module(s) the loop calls: the compiled or DDP wrapper, not the inside.
        optimizer: the optimizer(s) the loop steps; several of one loop are one logical step.
        lr_scheduler: never touched; named so that one call says all.
        grad_scaler: the GradScaler, if the loop has one. Without it losses look scaled.
        loss_fn: lets the canary tell bad data from bad weights when the model does not return its
            loss: a loss module that the loop calls, or a function that it calls as
            session.loss(batch); see canary.py.
        policy: a shipped policy's name, a TOML file, or a Policy.
        mode: "act" or "observe"; default what the policy says.
        sidecar: "auto" ($SENTINEL_SIDECAR, else the standard socket, else none), None, or a URL.
        decide: "sidecar" (wait for it, up to the deadline) or "trainer" (never wait).
        run_id: default $SENTINEL_RUN_ID, else the launcher's, else a new one. A run that is there
            already is continued: budgets, cooldowns, LR cut and incidents are as they were left.
        run_dir: the trace is written to run_dir/run_id; default $SENTINEL_RUN_DIR, else
            "sentinel-runs".
        record: write the trace.
        extra_state: objects with state_dict() and load_state_dict() that a rollback puts back.
        batch_id: called once a step; names the batch in reports.
        webhook: an address that is posted a JSON object when something happens; default
            $SENTINEL_WEBHOOK, else none. Of several ranks the first one tells.
        reads: "now": one read of the device a step. "late": none on calm steps; fused SGD, Adam,
            AdamW and Adagrad, one process, no GradScaler (docs/signals.md).
        norm_fn: called at the gate, returns the global gradient norm, where ours would be wrong.

    Raises:
        AttachError: something is missing, of the wrong type, or already attached; or the run was
            halted and nobody has cleared that, or another live process trains it.
        ConfigError: the policy or another setting makes no sense.
    """
    if reads not in ("now", "late"):
        raise AttachError(f"reads must be 'now' or 'late', got {reads!r}")
    if trainer is not None:
        if reads == "late":
            raise AttachError(
                "reads='late' needs the objects of the loop, and attach() was given a trainer; "
                "give it model= and optimizer=, or leave reads='now'"
            )
        for name, value in (
            ("model", model),
            ("optimizer", optimizer),
            ("lr_scheduler", lr_scheduler),
            ("grad_scaler", grad_scaler),
        ):
            if value is not None:
                raise AttachError(
                    f"attach() was given a trainer and {name}=; give the trainer, which knows its "
                    "objects, or the objects without it"
                )
        return _attach_trainer(
            trainer,
            loss_fn=loss_fn,
            policy=policy,
            mode=mode,
            sidecar=sidecar,
            decide=decide,
            run_id=run_id,
            run_dir=run_dir,
            record=record,
            signals=signals,
            snapshots=snapshots,
            extra_state=extra_state,
            batch_id=batch_id,
            norm_fn=norm_fn,
            webhook=webhook,
        )
    try:
        target = plain.collect(model, optimizer, lr_scheduler, grad_scaler, extra_state)
        for number, item in enumerate(target.optimizers):
            if is_attached(item):
                raise AttachError(
                    f"optimizer {number} is attached already; detach() the other session first, or "
                    "use the one that is there"
                )
        _check_options(loss_fn, batch_id, norm_fn, signals, snapshots, record)
        if reads == "late":
            decide = _check_late(target, decide, norm_fn)
        directory = _directory(run_dir)
        chosen = Policy.load(policy).with_mode(mode)
        run, named = _run_id(run_id)
        if named and run_id is None and _first_rank():
            run = _free_here(directory, run)
        address = outlets.webhook_address(webhook)
        table = LayerTable.of(target.models)
    except SentinelError as error:
        meeting.decline(str(error))
        raise

    spots: list[BlindSpot] = []
    signals = signals if signals is not None else Signals()
    snapshots = snapshots if snapshots is not None else Snapshots()
    paper = _paper(target, table, chosen, signals, snapshots, norm_fn=norm_fn, run=run)
    together = meeting.meet(paper) if meeting.world_size() > 1 else meeting.Met(0, 1, run=run)
    if together.world > 1 and together.group is None:
        spots.append(BlindSpot(f"{together.world} ranks: {together.why}", _APART))
        chosen = chosen.with_mode(Mode.OBSERVE)
        mode = Mode.OBSERVE
    group = together.group

    def begin() -> _Beginning:
        return _begin(
            table,
            chosen,
            policy=policy,
            mode=mode,
            sidecar=sidecar,
            decide=decide,
            run=run,
            named=named,
            directory=directory,
            record=record,
            spots=spots,
        )

    council: Council | None = None
    apart = together.why if together.world > 1 and group is None and together.alike else ""
    if group is None and together.rank and not _goes_by_itself(run_id, together):
        # Rank 0's files and wires are the run's, as they are when the ranks act together.
        record, run = False, together.run or run
        _refuse_halted(directory / run, run)  # as rank 0 does, if it is named
        beginning = _beginning_of_nothing(chosen, directory, run)
    elif group is None:
        beginning = begin()
    else:
        try:
            beginning, council = _begin_together(group, begin, directory, target, table, signals)
        except LostError as error:
            group = None
            record = False
            apart = f"the ranks lost each other while attaching ({error})"
            beginning = _beginning_of_nothing(chosen, directory, together.run)
    given = Given(
        target=target,
        layers=table,
        keeper=beginning.keeper,
        run_id=beginning.run,
        run_dir=directory,
        link=beginning.link,
        record=record and (group is None or group.rank == 0),
        incarnation=beginning.incarnation,
        loss_fn=loss_fn,
        signals=signals,
        snapshots=snapshots,
        batch_id=batch_id,
        norm_fn=norm_fn,
        blind_spots=spots,
        council=council,
        outlets=_outlets(beginning, directory, table, record, address, together.rank),
        first_save=beginning.first_save,
        sharers=int(os.environ.get("LOCAL_WORLD_SIZE") or together.world),
        late=reads == "late",
    )
    session = Session(given)
    if apart:
        session.stand_aside(f"not all ranks are attached: {apart}")
    elif together.world > 1 and group is None:
        logger.error(
            "the ranks cannot act together, this run is only observed run=%s why=%s way_out=%s",
            session.run_id,
            together.why,
            _APART,
        )
    logger.info(
        "attached run=%s policy=%s mode=%s layers=%s optimizers=%s rank=%s ranks=%s",
        session.run_id,
        session.policy.name,
        session.policy.mode,
        len(session.layers),
        len(target.optimizers),
        together.rank,
        together.world,
    )
    return session


def _outlets(
    beginning: _Beginning,
    directory: Path,
    table: LayerTable,
    record: bool,
    address: str,
    rank: int,
) -> outlets.Outlets | None:
    """Of the first rank; the text file only where no sidecar exports the same."""
    if rank:
        return None
    page = None
    if record and not beginning.link.status().url:
        page = Textfile(
            beginning.run,
            policy=beginning.link.policy,
            incarnation=beginning.incarnation,
            layers=[x.name for x in table.layers],
        )
    return outlets.Outlets.of(run=beginning.run, run_dir=directory, page=page, webhook=address)


_APART = (
    "call attach() on every rank, at the same place, with the same arguments; until then this rank "
    "decides nothing, because ranks that decide alone could act differently"
)


def _paper(
    target: Target,
    table: LayerTable,
    policy: Policy,
    signals: Signals,
    snapshots: Snapshots,
    *,
    norm_fn: Any,
    run: str,
) -> meeting.Paper:
    """What this rank is about to watch."""
    return meeting.Paper(
        layers=codec.digest(repr(table.rows()).encode()).hex(),
        optimizers=len(target.optimizers),
        policy=codec.policy_hash(policy).hex(),
        signals=repr(signals),
        # Bounds on this machine's memory and disk may differ as machines do: where one is met,
        # the ranks hear that the copy failed. Functions cannot be compared but for being there.
        snapshots={name: repr(getattr(snapshots, name)) for name in ("ram", "disk", "disk_keep")}
        | {"adopt": "None" if snapshots.adopt is None else "a function"},
        norm_fn=norm_fn is not None,
        acts=not any(
            type(m).__name__ == "FullyShardedDataParallel"
            for model in target.models
            for m in model.modules()
        ),
        run=run,
    )


def _goes_by_itself(run_id: str | None, together: meeting.Met) -> bool:
    """Ranks that only observe are one run, unless the user has named this rank's another."""
    return not together.alike and run_id not in (None, together.run)


@dataclass(slots=True)
class _Beginning:
    """What one process knows of its run when it starts; of several ranks, rank 0."""

    run: str
    incarnation: str
    link: Link
    keeper: Keeper
    first_save: int = 0


class _Hello(msgspec.Struct):
    """From rank 0 to the others, once."""

    run: str = ""
    incarnation: str = ""
    policy: bytes = b""
    sidecar: bool = False
    url: str = ""
    step: int = 0
    ledger: bytes = b""  # a state with cold statistics, of a run that was found
    paused: bool = False
    first_save: int = 0
    error: str = ""
    halted: bool = False


def _begin(
    table: LayerTable,
    chosen: Policy,
    *,
    policy: Any,
    mode: Any,
    sidecar: str | None,
    decide: str | None,
    run: str,
    named: bool,
    directory: Path,
    record: bool,
    spots: list[BlindSpot],
) -> _Beginning:
    writes = (record or named) and _first_rank()
    claim: Claim | None = None
    if named and writes:
        claim = _claim(directory / run, run)
    found = _found(directory / run, run, spots) if named else None
    incarnation = secrets.token_hex(4)  # os.urandom: no global generator moves
    link = make_link(
        sidecar,
        decide,
        run=run,
        incarnation=incarnation,
        policy=chosen,
        pinned=policy != "default",
        mode=Mode(mode) if mode is not None else None,
        layers=[
            messages.Layer(x.name, x.kind, x.shape, x.block, x.attention) for x in table.layers
        ],
        info={"host": platform.node(), "pid": str(os.getpid()), "torch": torch.__version__},
    )
    if link.status().url and not messages.RUN_NAME.fullmatch(run):
        spots.append(
            BlindSpot(
                f"the sidecar takes no run id like {run!r}: it neither decides nor records",
                "use 1 to 128 letters, digits and ._:@+- that start with a letter or digit",
            )
        )
    keeper = Keeper(
        directory / run,
        run=run,
        incarnation=incarnation,
        policy=link.policy,
        found=found,
        enabled=writes,
        claim=claim,
    )
    return _Beginning(run, incarnation, link, keeper)


def _beginning_of_nothing(policy: Policy, directory: Path, run: str) -> _Beginning:
    """For a session that stands aside, or a rank that only observes: nothing is written or sent."""
    incarnation = secrets.token_hex(4)
    keeper = Keeper(directory / run, run=run, incarnation=incarnation, policy=policy, enabled=False)
    return _Beginning(run, incarnation, EmbeddedLink(policy), keeper)


def _begin_together(
    group: Group,
    begin: Callable[[], _Beginning],
    directory: Path,
    target: Target,
    table: LayerTable,
    signals: Signals,
) -> tuple[_Beginning, Council]:
    """Rank 0 begins the run and tells the others; its error is everybody's.

    Raises:
        AttachError: rank 0 cannot attach, on all ranks.
        LostError: the ranks lost each other.
    """
    hello = _Hello()
    beginning: _Beginning | None = None
    failed: Exception | None = None
    if group.rank == 0:
        try:
            beginning = begin()
            beginning.first_save = _highest_save(directory / beginning.run) + 1
            state = beginning.keeper.state()
            status = beginning.link.status()
            hello = _Hello(
                run=beginning.run,
                incarnation=beginning.incarnation,
                policy=codec.encode_policy(beginning.link.policy),
                sidecar=bool(status.url) and status.decide is Decide.SIDECAR,
                url=status.url,
                ledger=codec.encode_state(state) if beginning.keeper.found is not None else b"",
                paused=beginning.keeper.paused_by_file,
                first_save=beginning.first_save,
            )
        except Exception as error:  # noqa: BLE001  it is raised below, on all ranks
            failed = error
            halted = isinstance(error, StillHalted)
            hello = _Hello(
                error=str(error) if halted else f"{type(error).__name__}: {error}", halted=halted
            )
    told = group.tell_any(msgspec.msgpack.encode(hello) if group.rank == 0 else None)
    hello = msgspec.msgpack.decode(told, type=_Hello)
    if failed is not None:
        group.close("rank 0 cannot attach")
        raise failed
    if hello.error:
        group.close("rank 0 cannot attach")
        if hello.halted:  # this one ends a trainer's run: on all ranks, or the others wait for it
            raise StillHalted(hello.error)
        raise AttachError(f"rank 0 cannot attach: {hello.error}")
    if beginning is None:
        policy = codec.decode_policy(hello.policy)
        keeper = Keeper(
            directory / hello.run,
            run=hello.run,
            incarnation=hello.incarnation,
            policy=policy,
            enabled=False,
        )
        keeper.paused_by_file = hello.paused
        if hello.ledger:
            keeper.begin_with = codec.decode_state(hello.ledger)
        beginning = _Beginning(
            hello.run,
            hello.incarnation,
            EmbeddedLink(policy, asked_by_rank_0=hello.url),
            keeper,
            hello.first_save,
        )
    agreement = Agreement(group, Layout(len(table), *part_names(signals)))
    sharded = any(hasattr(p, "device_mesh") for m in target.models for p in m.parameters())
    return beginning, Council(
        agreement, sidecar=hello.sidecar, store=meeting.store_of_this_meeting(), sharded=sharded
    )


def _highest_save(directory: Path) -> int:
    return max((s.number for s in stored.list_snapshots(directory)), default=-1)


def _attach_trainer(trainer: Any, *, loss_fn: Any, **options: Any) -> Session:
    """Everything that can be checked now; the objects come when training starts."""
    adapter = adapters.discover(trainer)
    if waiting.watched(trainer) is not None:
        raise AttachError(
            f"this {adapter.name} is attached already; detach() the other session first, or use "
            "the one that is there"
        )
    names = ("batch_id", "norm_fn", "signals", "snapshots", "record")
    _check_options(loss_fn, *(options[name] for name in names))
    plain.collect_extra(options["extra_state"])
    options["run_dir"] = directory = _directory(options["run_dir"])
    run, named = _run_id(options["run_id"])
    if named:
        _refuse_halted(directory / run, run)
    policy = Policy.load(options["policy"]).with_mode(options["mode"])
    if options["policy"] != "default":  # a file may be another one when training starts
        options["policy"] = Policy.load(options["policy"])
    session = waiting.TrainerSession(
        trainer,
        adapter,
        functools.partial(attach, **options),
        policy=policy,
        run_dir=directory,
        run_id=run if named else "",
        loss_fn=loss_fn,
        adopts=options["snapshots"] is not None and options["snapshots"].adopt is not None,
    )
    logger.info(
        "attached trainer=%s run=%s policy=%s mode=%s waits_for=%s",
        adapter.name,
        session.run_id or "(new)",
        policy.name,
        policy.mode,
        "nothing" if session.live else adapter.waits_for,
    )
    return cast(Session, session)  # it has the same face


def _check_options(
    loss_fn: Any, batch_id: Any, norm_fn: Any, signals: Any, snapshots: Any, record: Any
) -> None:
    _check_loss_fn(loss_fn)
    for name, value in (("batch_id", batch_id), ("norm_fn", norm_fn)):
        _check_function(name, value)
    for name, given, kind in (("signals", signals, Signals), ("snapshots", snapshots, Snapshots)):
        if given is not None and not isinstance(given, kind):
            raise AttachError(
                f"{name} must be a sentinel_hooks.{kind.__name__}, got {type(given).__name__}; "
                f"make one: {kind.__name__}(...)"
            )
    if not isinstance(record, bool):
        raise AttachError(f"record must be True or False, got {record!r}")


def _check_late(target: Target, decide: str | None, norm_fn: Any) -> str:
    """Refuse what cannot be read late; returns `decide`."""
    now = "or leave reads='now'"
    if meeting.world_size() > 1:
        raise AttachError(
            f"reads='late' is for one process, and here are {meeting.world_size()} ranks, which "
            f"agree on what they measured at every step; leave reads='now'"
        )
    if decide == Decide.SIDECAR:
        raise AttachError(
            "reads='late' cannot wait for a sidecar, which is told one step later; pass "
            f"decide='trainer', {now}"
        )
    if norm_fn is not None:
        raise AttachError(
            f"reads='late' cannot use norm_fn, whose number is read at every step; leave it out, "
            f"{now}"
        )
    late.check_target(target)
    return str(Decide.TRAINER)


def _check_loss_fn(loss_fn: Any) -> None:
    if loss_fn is None:
        return
    if isinstance(loss_fn, type):
        raise AttachError(
            f"loss_fn must be a function or a loss module, got the class {loss_fn.__name__}; give "
            f"the object that the loop calls: {loss_fn.__name__}(...)"
        )
    if not callable(loss_fn):
        raise AttachError(
            f"loss_fn must be a function or a loss module, got {type(loss_fn).__name__}; leave it "
            "out if the model returns its loss"
        )


def _check_function(name: str, value: Any) -> None:
    """batch_id and norm_fn are called with nothing."""
    if value is None:
        return
    if not callable(value):
        raise AttachError(
            f"{name} must be a function without arguments, got {value!r}; "
            f"wrap it: {name}=lambda: ..."
        )
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise AttachError(
            f"{name} must be a function without arguments, got one that cannot be called so "
            f"({error}); wrap it: {name}=lambda: ..."
        ) from None
    except ValueError:
        pass  # written in C, without a signature


def _directory(given: Any) -> Path:
    """The argument, else the environment's, else a folder in the current one."""
    source, run_dir = "run_dir", given
    if run_dir is None:
        source = f"${RUN_DIR_VARIABLE}"
        run_dir = default_run_dir()
    if not isinstance(run_dir, str | os.PathLike) or not str(run_dir) or "\0" in str(run_dir):
        raise AttachError(
            f"{source} must be the path of a folder, got {run_dir!r}; for the current one give "
            "'.', to write no trace record=False"
        )
    try:
        return Path(run_dir).absolute()  # the loop may change the current folder later
    except OSError:  # the current one is gone: what cannot be written says so by itself
        return Path(run_dir)


def _run_id(given: Any) -> tuple[str, bool]:
    """The argument, else the environment's, else a new one; and whether somebody chose it."""
    source, run = "run_id", given
    if run is None:
        source, run = f"${RUN_ID_VARIABLE}", os.environ.get(RUN_ID_VARIABLE) or None
    if run is None:
        source, run = f"${LAUNCHER_VARIABLE}", os.environ.get(LAUNCHER_VARIABLE) or None
    if run is None or (source != "run_id" and run == "none"):
        return _new_run_id(), False
    if (
        not isinstance(run, str)
        or not 0 < len(run.encode("utf-8", "replace")) <= RUN_ID_BYTES
        or run != run.strip()
        or not run.isprintable()
        or run in (".", "..")
        or "/" in run
        or "\\" in run
    ):
        raise AttachError(
            f"{source} must be usable as a directory name: 1 to {RUN_ID_BYTES} bytes, printable, "
            f"without / and \\, got {run!r}; leave it out for a new one"
        )
    if run == PAUSE_FILE:
        raise AttachError(
            f"{source} must not be {run!r}: whatever has that name in run_dir pauses every run "
            "there; give this one another id"
        )
    return run, True


def _free_here(directory: Path, run: str) -> str:
    """An id from the environment is the process's: its second live session is <id>-2, and so on.

    In the order of attach(), so that a restarted process finds each again.
    """
    name, number = run, 1
    while claimed_here(directory / name):
        gc.collect()  # a session that nobody holds any more lets go
        if not claimed_here(directory / name):
            break
        number += 1
        name = f"{run}-{number}"
    return name


def _claim(directory: Path, run: str) -> Claim:
    """Raises AttachError: another live process trains this run."""
    claim = Claim(directory)
    if claim.holder:
        gc.collect()  # a session that nobody holds any more has let go by now
        claim = Claim(directory)
    if claim.holder:
        raise AttachError(
            f"run {run} is being trained by {claim.holder}; end it (or detach() its session) "
            "first, or give this one another run_id"
        )
    return claim


def _found(directory: Path, run: str, spots: list[BlindSpot]) -> ledger.Saved | None:
    """What an earlier process of this run has left.

    Raises:
        StillHalted: the run was halted and nobody has cleared that.
    """
    _refuse_halted(directory, run)
    try:
        found = ledger.read(directory)
    except TraceError as error:
        aside = ledger.set_aside(directory)
        logger.error("the ledger starts anew run=%s reason=%s kept_as=%s", run, error, aside)
        spots.append(
            BlindSpot(
                f"what was done to this run before is lost, its budgets are full again: {error}",
                f"the damaged file is kept as {aside}",
            )
        )
        return None
    if found is not None and found.run != run:
        logger.error("the ledger is of another run run=%s found=%s", run, found.run)
        spots.append(BlindSpot(f"the ledger in {directory} is of run {found.run}: not used", ""))
        return None
    return found


def _refuse_halted(directory: Path, run: str) -> None:
    halted = ledger.read_halted(directory)
    if halted is None:
        return
    at = f" at step {halted['step']} ({halted.get('reason', '')})" if "step" in halted else ""
    raise StillHalted(
        f"run {run} was halted{at} and {directory / ledger.HALTED} has not been cleared; when "
        f"the cause is gone: sentinel resume {directory}, or delete that file; to start "
        "another run, give another run_id"
    )


def _first_rank() -> bool:
    """One process of a run writes its ledger."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def _new_run_id() -> str:
    now = dt.datetime.now(dt.UTC)
    return f"r{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
