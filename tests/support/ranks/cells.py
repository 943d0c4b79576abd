"""One cell of the trainer matrix, in one rank: framework x layout x compiled x accumulation x clip.

    ranks.run("tests.support.ranks.cells:cell", 2, args={"framework": "hf", "layout": "fsdp", ...})

args: framework (a name of trainers.WORLDS), layout ("one", "ddp", "fsdp"), backend (of
torch.compile; "" for eager), accumulation, clip, attach, and the faults nan_at (on rank 1 only, or
on the only one) and damage_at (all weights of every rank). The rank says

    {"what": "step", "t", "held", "rate", "restored", "entered", "hash"}    as loop.py does
    {"what": "end", "fingerprint", "status", "sharded", "kind"}

and reads nothing of ours but status().

accelerate (and HF through it) shards on accelerators only: on a CPU it takes a run with an FSDP
plugin for plain DDP and says nothing. GPUS_ARE_CPUS lifts that one rule, in the class that says
which kind of run this is; all that follows is theirs: fully_shard on a CPU mesh.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support import trainers
from tests.support.ranks.loop import fingerprint
from tests.support.ranks.rank import Rank

TIMEOUT_S = 60.0
GPUS_ARE_CPUS = True


def cell(me: Rank) -> int:
    """See the module docstring."""
    warnings.simplefilter("ignore")
    args, alone = me.args, me.args["layout"] == "one"
    if alone:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            os.environ.pop(name, None)
    framework = args["framework"]
    options, wrap = _layout(me, framework, args["layout"])
    spec = trainers.Cell(
        steps=args.get("steps", 40),
        accumulation=args.get("accumulation", 1),
        clip=args.get("clip"),
        compiled=args.get("backend", ""),
        seed=args.get("seed", 3),
        nan_at=tuple(args.get("nan_at", ())),
        damage_at=args.get("damage_at"),
        rank=me.number,
        world=me.ranks,
        fault_ranks=None if alone else (1,),
        options=options,
        wrap=wrap,
    )
    world = trainers.WORLDS[framework](spec, Path(f"rank{me.number}"))
    session = None
    if args.get("attach", False):
        import sentinel_hooks
        from sentinel.core.policy import Policy

        rules = trainers.QUICK + args.get("rules", "")
        session = sentinel_hooks.attach(
            **world.attach_options(),
            policy=Policy.parse(rules, "matrix"),
            sidecar=None,
            run_dir="runs",
        )
    books = _Books(me, world)
    world.before_step = books.before_step
    world.train()
    books.close()
    end: dict[str, Any] = {"fingerprint": _local_fingerprint(world)}
    parameters = [p for o in world.optimizers for g in o.param_groups for p in g["params"]]
    end["sharded"] = all(isinstance(p, DTensor) for p in parameters)
    end["kind"] = sorted({type(p).__name__ for p in parameters})
    end["ranks"] = dist.get_world_size() if dist.is_initialized() else 1
    if session is not None:
        status = session.status()
        end["status"] = {
            "protection": str(status.protection),
            "why": status.why,
            "errors": dict(status.internal_errors),
            "skipped": dict(status.counters.skipped),
            "rollbacks": dict(status.counters.rollbacks),
            "text": str(status),
        }
        session.detach()
    me.say("end", **end)
    return 0


def _layout(me: Rank, framework: str, layout: str) -> tuple[dict[str, Any], Any]:
    """What the framework must be told, and how a loop wraps its model by itself."""
    if layout == "one":
        return {}, None
    if framework == "plain":
        me.join(TIMEOUT_S)
        return {}, DistributedDataParallel if layout == "ddp" else _shard
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if framework.startswith("lightning"):
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment
        from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

        common = {"devices": me.ranks, "use_distributed_sampler": False}
        place = TorchElasticEnvironment()
        if layout == "ddp":
            strategy: Any = DDPStrategy(process_group_backend="gloo", cluster_environment=place)
            return {**common, "strategy": strategy}, None
        strategy = ModelParallelStrategy(
            data_parallel_size=me.ranks, tensor_parallel_size=1, process_group_backend="gloo"
        )
        strategy.cluster_environment = place
        return {**common, "strategy": strategy}, _shard
    if layout == "ddp":
        return {}, None
    _count_cpus_as_gpus()
    if framework == "hf":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        return {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Block"]},
        }, None
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    return {"fsdp_plugin": plugin}, None


def _count_cpus_as_gpus() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if not GPUS_ARE_CPUS:
        return
    begin = PartialState.__init__

    def lifted(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = lifted


def _shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _local_fingerprint(world: trainers.World) -> dict[str, Any]:
    parameters = [p for o in world.optimizers for g in o.param_groups for p in g["params"]]
    return {
        "parameters": fingerprint(parameters, world.optimizers[0]),
        "schedulers": [trainers.digest(trainers._plain(s.state_dict())) for s in world.schedulers],
        "consumed": trainers.digest(world.collate.consumed),
        "dice": trainers.dice(),
    }


class _Books:
    """What the optimizer itself sees of each step."""

    def __init__(self, me: Rank, world: trainers.World) -> None:
        self.me, self.world = me, world
        self.optimizer: Any = None
        self.handles: list[Any] = []
        self.before: dict[str, int] = {}
        self.left = ""
        self.entered = ""
        self.rate = 0.0
        self.t = -1

    def before_step(self, t: int) -> None:
        """Before the first micro-batch of step t."""
        self.t = self.me.step = t
        if not self.handles and self.world.optimizers:
            self.optimizer = self.world.optimizers[0]
            self.handles = [
                self.optimizer.register_step_pre_hook(self._stepping),
                self.optimizer.register_step_post_hook(self._stepped),
            ]
        if t == self.world.cell.damage_at:
            self.left = ""

    def now(self) -> str:
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        return fingerprint(parameters, self.optimizer)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.entered = self.now()
        self.rate = optimizer.param_groups[0]["lr"]

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        after = self.now()
        record: dict[str, Any] = {"t": self.t, "held": after == self.entered, "rate": self.rate}
        if self.left and self.entered != self.left:
            record["restored"] = self.before.get(self.entered, -1)
        elif after != self.entered and after in self.before:
            record["restored"] = self.before[after]  # where no forward is seen: after the step
        self.before[self.entered] = self.t
        self.left = after
        self.me.say("step", **record, entered=self.entered, hash=after)

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
