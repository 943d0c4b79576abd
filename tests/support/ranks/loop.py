"""A small training run of several ranks, as a user would write it; attached or not.

    train(me)       args: world, seed, steps, timeout_s, attach, faults, ... (see Setup)

The loop keeps its own books, and asks sentinel only for status(): after each step it says

    {"what": "step", "t", "held", "rate", "restored", "hash", "loss", "protection"}

held: neither parameters nor optimizer state moved over optimizer.step(). rate: the learning rate in
force inside step() over the scheduled one. restored: the weights in this step's forward are not
those the last step left but those before step k (k; -1 for unknown ones; absent for no).
hash: parameters and optimizer state of this rank after the step.

Worlds: "ddp", "fsdp" (fully_shard of each block and of the whole, on a CPU mesh), "plain" (one
all-reduce of the gradients, written by the user). Batches are drawn from (seed, step, rank).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import hashlib
import logging
import math
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support.ranks.rank import Rank

WIDTH, BLOCKS, IN = 20, 2, 12

RULES = """
[spike]
window = 20
warmup = 16
[snapshots]
ram_every = 8
confirm = 4
disk_at = []
disk_every = 16
[lr]
hold = 3
rewarm = 8
again_hold = 3
again_rewarm = 8
[rollback]
quiet = 6
[rules.grad_norm]
mode = "off"
[rules.loss_outlier]
mode = "act"
"""


@dataclass(kw_only=True)
class Setup:
    """What `args` may hold.

    Attributes:
        attach: "all", "rank0", "none".
        nan: {step: rank} the loss of that rank is NaN; nan_grad: one gradient entry after the
            reduction of the user, on that rank only.
        damage: steps before whose forward all ranks multiply their weights by noise.
        rogue: {step: rank} that rank alone leaves its update out: what a judge must notice.
        survey: say which places were passed in which step.
        dump: steps whose gradients (before clipping) and weights go to rank<r>-step<t>.pt.
        moves: {step: what}, before that step: "detach", "detach:1" (rank 1 only), "attach",
            "attach-twice", "spoil:1" (rank 1's engine has another state from then on).
        keep_every: the loop saves a checkpoint of its own before each such step, rank by rank;
            resume: it starts from the newest that every rank has. shift: added to the seed of the
            batches, so that a resumed run is not the same one again.
        count: say how many collectives of ProcessGroupGloo objects Python code has asked for.
        odd: {rank: options} of attach() on that rank alone; errors that are logged are said.
        orders: say after each step which people's orders the engine has obeyed; pause_s: sleep
            after each step.
        uneven: steps that all but rank 0 have fewer, under DDP's join().
        script: {step: {"held", "rate", "restored"}}: done by hand, as another run's books say.
    """

    world: str = "ddp"
    seed: int = 4
    steps: int = 44
    rows: int = 16
    timeout_s: float = 4.0
    attach: str = "none"
    rules: str = RULES
    canary: bool = False
    clip: float | None = None
    accumulation: int = 1
    no_sync: bool = False
    recompute: bool = False
    evaluate: int = 0
    mixed: bool = False
    compiled: str = ""
    nan: dict[str, int] = field(default_factory=dict)
    nan_grad: dict[str, int] = field(default_factory=dict)
    damage: list[int] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    survey: bool = False
    instrument: bool = True
    rogue: dict[str, int] = field(default_factory=dict)
    dump: list[int] = field(default_factory=list)
    script: dict[str, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    odd: dict[str, dict[str, Any]] = field(default_factory=dict)
    uneven: int = 0
    orders: bool = False
    pause_s: float = 0.0
    snapshots: dict[str, Any] = field(default_factory=dict)
    save: bool = False
    moves: dict[str, str] = field(default_factory=dict)
    keep_every: int = 0
    resume: bool = False
    shift: int = 0
    count: bool = False

    @classmethod
    def of(cls, args: dict[str, Any]) -> Setup:
        """Unknown keys are for other readers of args."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in args.items() if k in known})


class Block(nn.Module):
    """A residual block with a parameter of odd size, so that shards are uneven."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH + 3)
        self.down = nn.Linear(WIDTH + 3, WIDTH)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and self.training and torch.is_grad_enabled():
            return x + checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
        return x + self.inner(x)


class Net(nn.Module):
    """Returns its loss. `seen` is called inside each forward, behind every hook of others."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 1)
        self.seen: Any = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.seen is not None and self.training and torch.is_grad_enabled():
            self.seen()
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.last(x).float(), y.to(torch.float32) if x.dtype != y.dtype else y)


def batch(seed: int, t: int, rank: int, micro: int, rows: int) -> tuple[Tensor, Tensor]:
    """Always the same for the same arguments; the target carries noise."""
    g = torch.Generator().manual_seed(((seed * 1009 + t) * 97 + rank) * 13 + micro)
    x = torch.randn(rows, IN, generator=g)
    noise = torch.randn(rows, 1, generator=g)
    return x, (x.sum(1, keepdim=True) / 4).sin() + 0.3 * noise


def initial(seed: int, recompute: bool = False) -> Net:
    """The model before anything is wrapped around it."""
    torch.manual_seed(seed)
    return Net(recompute)


def local(value: Tensor) -> Tensor:
    """The part that this rank holds, and no graph."""
    value = value.detach()
    return value.to_local() if hasattr(value, "to_local") else value  # type: ignore[no-any-return]


def fingerprint(parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> str:
    """Parameters and moments of this rank, bit for bit."""
    h = hashlib.blake2b(digest_size=8)
    for p in parameters:
        for value in (p, *optimizer.state.get(p, {}).values()):
            if isinstance(value, Tensor):
                # A copy: a live FSDP2 parameter that was once .numpy() can not be resized again.
                h.update(local(value).clone().view(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


class World:
    """Model, optimizer, schedule and the user's way of working with several ranks."""

    def __init__(self, me: Rank, setup: Setup) -> None:
        self.me, self.setup = me, setup
        self.net = initial(setup.seed, setup.recompute)
        self.forward: nn.Module = self.net
        if setup.world == "ddp":
            self.forward = DistributedDataParallel(self.net)
        elif setup.world == "fsdp":
            mesh = init_device_mesh("cpu", (me.ranks,))
            policy = (
                MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                if setup.mixed
                else MixedPrecisionPolicy()
            )
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(self.net, mesh=mesh, mp_policy=policy)
        self.called: Any = self.forward
        if setup.compiled:
            self.called = self.forward = torch.compile(self.forward, backend=setup.compiled)
        self.names = [name for name, _ in self.net.named_parameters()]
        self.parameters = list(self.net.parameters())  # FSDP2 swaps them inside a forward
        self.optimizer = torch.optim.AdamW(self.parameters, lr=3e-3, weight_decay=0.01)
        # Never zero: a test that waits for people may go on past the 400 steps.
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, 400, eta_min=1e-6
        )

    def autocast(self) -> Any:
        if self.setup.mixed and self.setup.world != "fsdp":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def backward(self, t: int) -> float:
        setup, me = self.setup, self.me
        total = 0.0
        for micro in range(setup.accumulation):
            x, y = batch(setup.seed + setup.shift, t, me.number, micro, setup.rows)
            if setup.nan.get(str(t)) == me.number:
                x = x * float("nan")
            last = micro == setup.accumulation - 1
            hold_sync = setup.no_sync and not last
            if setup.world == "fsdp":
                self.net.set_requires_gradient_sync(not hold_sync)
            no_sync = (
                self.forward.no_sync()
                if hold_sync and isinstance(self.forward, DistributedDataParallel)
                else contextlib.nullcontext()
            )
            with no_sync:
                me.at("loop.forward:entry")
                with self.autocast():
                    loss = self.called(x, y)
                me.at("loop.forward:exit")
                (loss / setup.accumulation).backward()
                me.at("loop.backward:exit")
            total += float(loss.detach()) / setup.accumulation
        if setup.world == "plain":
            grads = [p.grad for p in self.net.parameters() if p.grad is not None]
            flat = torch.cat([g.view(-1) for g in grads])
            dist.all_reduce(flat)
            flat /= me.ranks
            for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                g.copy_(part.view_as(g))
        if setup.nan_grad.get(str(t)) == me.number:
            with torch.no_grad():
                for p in self.parameters:
                    if p.grad is not None and local(p.grad).numel():
                        local(p.grad).view(-1)[0] = float("nan")
                        break
        return total

    def evaluate(self, t: int) -> None:
        """In the middle of training: both modes in which users evaluate."""
        x, y = batch(self.setup.seed + 777, t, self.me.number, 0, self.setup.rows)
        self.net.eval()
        with torch.no_grad():
            self.called(x, y)
        self.net.train()
        with torch.no_grad():
            self.called(x, y)

    def damage(self, t: int) -> None:
        """The same on every rank: weights times noise."""
        with torch.no_grad():
            for p in self.parameters:
                local(p).mul_(-2.5)


class Books:
    """What the loop itself sees of each step."""

    def __init__(self, me: Rank, world: World) -> None:
        self.me, self.world = me, world
        self.before: dict[str, int] = {}  # hash -> step it stood before
        self.left = self.now()
        self.entered = ""
        self.rate: float | None = None
        world.net.seen = self.forward
        # After attach: it sees the step as torch will do it.
        self._handle: Any = None

    def now(self) -> str:
        return fingerprint(self.world.parameters, self.world.optimizer)

    def watch(self) -> None:
        self._handle = self.world.optimizer.register_step_pre_hook(self._stepping)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        scheduled = self.world.schedule.get_last_lr()[0]
        self.rate = round(optimizer.param_groups[0]["lr"] / scheduled, 9)

    def dump(self) -> None:
        """What the norm is the norm of; and the weights it was made with."""
        named = list(zip(self.world.names, self.world.parameters, strict=True))
        grads = {n: local(p.grad).clone() for n, p in named if p.grad is not None}
        weights = {n: local(p).clone() for n, p in named}
        torch.save(
            {"grads": grads, "weights": weights}, f"rank{self.me.number}-step{self.me.step}.pt"
        )

    def forward(self) -> None:
        if not self.entered:
            self.entered = self.now()

    def restored(self, t: int) -> int | None:
        """Which step's weights this one began with, if not those the last one left."""
        found = None if self.entered == self.left else self.before.get(self.entered, -1)
        self.before[self.entered] = t
        return found


class Hand:
    """Skips, restores and cuts by hand, as a script says; imports nothing of ours."""

    def __init__(self, world: World) -> None:
        self.world, self.script = world, world.setup.script
        self.wanted = {o["restored"] for o in self.script.values() if "restored" in o}
        self.copies: dict[int, list[Any]] = {}

    def before(self, t: int) -> None:
        """Before the forward: restore, and keep what is restored later."""
        parameters, state = self.world.parameters, self.world.optimizer.state
        target = self.script.get(str(t), {}).get("restored")
        if target is not None:
            with torch.no_grad():
                for p, (value, moments) in zip(parameters, self.copies[target], strict=True):
                    local(p).copy_(value)
                    if not moments:
                        state.pop(p, None)
                    for name, moment in moments.items():
                        local(state[p][name]).copy_(moment)
        if t in self.wanted:
            self.copies[t] = [
                (
                    local(p).clone(),
                    {k: local(v).clone() for k, v in state.get(p, {}).items()},
                )
                for p in parameters
            ]

    @contextlib.contextmanager
    def stepping(self, t: int, *, rogue: bool) -> Iterator[None]:
        """Around optimizer.step()."""
        order = self.script.get(str(t), {})
        kept = [p.grad for p in self.world.parameters]
        hold = rogue or order.get("held", False)
        if hold:
            for p in self.world.parameters:
                p.grad = None
        groups = self.world.optimizer.param_groups
        rates = [g["lr"] for g in groups]
        for group in groups:
            group["lr"] = group["lr"] * order.get("rate", 1.0)
        yield
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        if hold:
            for p, grad in zip(self.world.parameters, kept, strict=True):
                p.grad = grad


def train(me: Rank) -> int:
    """The run; see Setup."""
    setup = Setup.of(me.args)
    began = time.monotonic()
    me.join(setup.timeout_s)
    world = World(me, setup)
    start = resume(me, world) if setup.resume else 0
    counted = count_collectives() if setup.count else None
    session = None
    told: dict[str, Any] = {"start": start}
    if setup.attach == "all" or (setup.attach == "rank0" and me.number == 0):
        asked = time.monotonic()
        try:
            session = attach(me, world)
        except Exception as error:
            traceback.print_exc()
            told["refused"] = f"{type(error).__name__}: {error}"[:300]
        told["attach_s"] = time.monotonic() - asked
    me.say("ready", seconds=time.monotonic() - began, **told, **me.survey())
    books = Books(me, world)
    books.watch()
    hand = Hand(world)
    ended = "done"
    uneven = setup.uneven and isinstance(world.forward, DistributedDataParallel)
    try:
        with world.forward.join() if uneven else contextlib.nullcontext():
            for t in range(start, setup.steps - (setup.uneven if me.number else 0)):
                if setup.keep_every and t % setup.keep_every == 0:
                    keep(me, world, t)
                session = move(me, world, session, setup.moves.get(str(t), ""))
                if counted is not None:
                    counted.clear()
                step(me, world, books, hand, session, t)
                if counted is not None:
                    me.say("collectives", t=t, **counted)
    except RuntimeError as error:
        # The user's own collectives fail when a rank is gone: that is not ours to prevent.
        ended = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    finish(me, world, books, session, ended)
    return 0


class _Saying(logging.Handler):
    """What is logged as an error is said."""

    def __init__(self, me: Rank) -> None:
        super().__init__(logging.ERROR)
        self.me = me

    def emit(self, record: logging.LogRecord) -> None:
        self.me.say("log", text=record.getMessage())


def attach(me: Rank, world: World) -> Any:
    """Attach as a user would; the places are instrumented first."""
    import sentinel_hooks
    from sentinel.core.policy import Policy
    from sentinel_hooks.snapshots import Snapshots
    from tests.support.ranks import places

    setup = world.setup
    if setup.instrument and (setup.survey or setup.faults):
        places.instrument(me)
    if setup.survey:
        me.passed = []
    if setup.odd:
        logging.getLogger("sentinel_hooks").addHandler(_Saying(me))
    odd = dict(setup.odd.get(str(me.number), {}))
    snapshots = setup.snapshots | odd.pop("snapshots", {})
    rules = setup.rules + f'[canary]\nmode = "{"on" if setup.canary else "off"}"\n'
    return sentinel_hooks.attach(
        model=world.forward,
        optimizer=world.optimizer,
        lr_scheduler=world.schedule,
        policy=Policy.parse(rules, "ranks"),
        snapshots=Snapshots(**snapshots),
        **{"sidecar": None, "run_dir": "runs", **setup.options, **odd},
    )


def count_collectives() -> collections.Counter[str]:
    """Of groups that Python code holds itself: the user's own go through C++."""
    counted: collections.Counter[str] = collections.Counter()
    gloo = dist.ProcessGroupGloo
    for name in ("allreduce", "broadcast", "allgather", "barrier", "reduce", "send", "recv"):
        original = getattr(gloo, name)

        def call(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            counted[_name] += 1
            return _original(*args, **kwargs)

        setattr(gloo, name, call)
    return counted


def move(me: Rank, world: World, session: Any, what: str) -> Any:
    """Attach and detach in the middle of a run."""
    what, _, only = what.partition(":")
    if not what or (only and int(only) != me.number):
        return session
    if what == "spoil":  # this rank's engine forgets what may be gone back to
        state = session.state
        ledger = dataclasses.replace(state.ledger, snapshots=(), in_weights=3)
        session.adopt_state(dataclasses.replace(state, ledger=ledger))
        return session
    if what == "detach":
        session.detach()
        me.say("moved", what_was="detach", status=str(session.status()))
        return session
    try:
        session = attach(me, world)
        me.say("moved", what_was=what, refused="")
    except Exception as error:
        me.say("moved", what_was=what, refused=f"{type(error).__name__}: {error}"[:300])
    return session


def keep(me: Rank, world: World, t: int) -> None:
    """The loop's own checkpoint: this rank's part, whole or not there."""
    parts = [
        (local(p).clone(), {k: local(v).clone() for k, v in world.optimizer.state[p].items()})
        for p in world.parameters
    ]
    path = f"kept-{me.number}-{t:04d}.pt"
    torch.save({"parts": parts, "schedule": world.schedule.state_dict(), "t": t}, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def resume(me: Rank, world: World) -> int:
    """From the newest checkpoint of which every rank has its part; returns its step."""
    mine = {p.stem[-4:] for p in Path().glob(f"kept-{me.number}-*.pt")}
    newest = torch.tensor([max((int(t) for t in mine), default=0)])
    dist.all_reduce(newest, op=dist.ReduceOp.MIN)
    t = int(newest)
    if f"{t:04d}" not in mine:
        return 0
    kept = torch.load(f"kept-{me.number}-{t:04d}.pt", weights_only=True)
    # A step that changes nothing makes the optimizer's state, of the right kinds.
    for p in world.parameters:
        p.grad = torch.zeros_like(p)
    rates = [g["lr"] for g in world.optimizer.param_groups]
    for group in world.optimizer.param_groups:
        group["lr"] = 0.0
    world.optimizer.step()
    for group, rate in zip(world.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    world.optimizer.zero_grad()
    with torch.no_grad():
        for p, (value, moments) in zip(world.parameters, kept["parts"], strict=True):
            local(p).copy_(value)
            for name, moment in moments.items():
                local(world.optimizer.state[p][name]).copy_(moment)
    world.schedule.load_state_dict(kept["schedule"])
    for group, rate in zip(world.optimizer.param_groups, world.schedule.get_last_lr(), strict=True):
        group["lr"] = rate
    return t


def step(me: Rank, world: World, books: Books, hand: Hand, session: Any, t: int) -> None:
    """One step of the loop, and the record of it."""
    setup = world.setup
    me.step = t
    me.at("loop.step:entry")
    if t in setup.damage:
        world.damage(t)
        books.left = books.now()
    hand.before(t)
    books.entered = ""
    world.optimizer.zero_grad()
    loss = world.backward(t)
    restored = books.restored(t)
    if t in setup.dump:
        books.dump()
    if setup.clip is not None:
        torch.nn.utils.clip_grad_norm_(world.net.parameters(), setup.clip)
    before = books.now()
    me.at("loop.optimizer_step:entry")
    with hand.stepping(t, rogue=setup.rogue.get(str(t)) == me.number):
        world.optimizer.step()
    me.at("loop.optimizer_step:exit")
    after = books.left = books.now()
    world.schedule.step()
    if setup.evaluate and t % setup.evaluate == 0:
        world.evaluate(t)
    record: dict[str, Any] = {"t": t, "held": before == after, "rate": books.rate, "hash": after}
    record["entered"] = books.entered
    if restored is not None:
        record["restored"] = restored
    record["loss"] = loss if math.isfinite(loss) else repr(loss)
    if session is not None:
        record["protection"] = str(session._protection()[0])
        if setup.orders:
            ledger = session.state.ledger
            record["orders"] = list(ledger.commands)
            record["automation"] = ledger.automation
    me.say("step", **record, **me.survey())
    if setup.pause_s:
        time.sleep(setup.pause_s)


def finish(me: Rank, world: World, books: Books, session: Any, ended: str) -> None:
    """What is left, and whether the user's own groups still work."""
    setup = world.setup
    me.step = setup.steps
    status: dict[str, Any] = {}
    if session is not None:
        told = session.status()
        status = {
            "run_id": told.run_id,
            "protection": str(told.protection),
            "why": told.why,
            "errors": dict(told.internal_errors),
            "text": str(told),
        }
    me.say("end", ended=ended, hash=books.now(), status=status)
    if setup.save:
        torch.save(
            {n: local(p).clone() for n, p in zip(world.names, world.parameters, strict=True)},
            f"rank{me.number}.pt",
        )
    if ended == "done":
        me.say("groups", **user_groups(me))
    if session is not None:
        began = time.monotonic()
        session.detach()
        me.say("detached", seconds=time.monotonic() - began, **me.survey())
    if ended == "done" and setup.attach != "none":
        me.say("groups_after", **user_groups(me))


def user_groups(me: Rank) -> dict[str, Any]:
    """The user makes a group of its own and reduces in it and in the default one."""
    try:
        one = torch.ones(1)
        dist.all_reduce(one)
        group = dist.new_group(timeout=dt.timedelta(seconds=me.args.get("timeout_s", 4.0)))
        two = torch.ones(1)
        dist.all_reduce(two, group=group)
    except Exception as error:
        return {"works": False, "error": f"{type(error).__name__}: {error}"[:300]}
    return {"works": float(one) == float(two) == me.ranks, "error": ""}
