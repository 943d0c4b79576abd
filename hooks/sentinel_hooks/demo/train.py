"""One training run in a process of its own, as a user would write it.

    python -m sentinel_hooks.demo.train '{"fault": "nan", "fault_step": 140, ...}'

The runner reads its stdout: one JSON object a line, `{"step": 10, "loss": 3.1}` now and then, and
`{"result": {...}}` at the end. All that protects the run is the one call of sentinel.attach().

Units:   loss [nats/byte]; steps.
Errors:  whatever goes wrong ends the process with a traceback on stderr and a status of 1.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import sentinel
from sentinel.core.types import Action, Source
from sentinel.traces.reader import Reader
from sentinel.traces.records import StepRecord
from sentinel.wire import codec
from sentinel_hooks.demo import faults
from sentinel_hooks.demo.corpus import Corpus
from sentinel_hooks.demo.model import GPT, Shape

PEAK_LR = 4e-3
LR_WARMUP = 30
FINAL_LR_SHARE = 0.1
VALIDATION_BATCHES = 24
REPORT_EVERY = 5
HOT_LEVEL = 1  # Readings.spike_level from which a step counts as noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one run is told; travels as JSON.

    Attributes:
        protected: attach sentinel.
        sidecar: its URL; None: embedded.
        run_dir: where the protected run's trace goes.
    """

    fault: str
    fault_step: int
    protected: bool
    seed: int
    steps: int
    run_id: str
    run_dir: str
    sidecar: str | None = None
    shape: Shape = field(default_factory=Shape)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "shape": Shape(**values["shape"])})


def schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine: the share of the peak learning rate."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(step, steps) / steps))
    return min(1.0, (step + 1) / LR_WARMUP) * (FINAL_LR_SHARE + (1.0 - FINAL_LR_SHARE) * cosine)


def train(settings: Settings) -> dict[str, Any]:
    """Train once; returns the run's result."""
    torch.manual_seed(settings.seed)
    fault = faults.make(settings.fault, settings.fault_step)
    shape, corpus = settings.shape, Corpus.load()
    model = GPT(shape)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, settings.steps) * fault.learning_rate(step)
    )
    protection: Any = nullcontext()
    if settings.protected:
        protection = sentinel.attach(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            sidecar=settings.sidecar,
            run_id=settings.run_id,
            run_dir=settings.run_dir,
        )
    with protection as session:
        for step in range(settings.steps):
            batch = corpus.batch(settings.seed, step, shape.rows, shape.length)
            inputs_BT, targets_BT = fault.batch(step, batch, settings.seed)
            fault.before_step(step, model)
            loss = model(inputs_BT, targets_BT)
            loss.backward()
            fault.after_backward(step, model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % REPORT_EVERY == 0 or step == settings.steps - 1:
                _tell({"step": step, "loss": loss.item()})
        status = str(session.status()) if session is not None else ""
    result: dict[str, Any] = {
        "validation_loss": validate(model, corpus, shape),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if session is not None:
        result.update(
            explain(Path(session.directory), settings),
            lost_steps=session.state.ledger.counters.lost_steps,
            status=status,
        )
    return result


@torch.no_grad()
def validate(model: GPT, corpus: Corpus, shape: Shape) -> float:
    """Mean loss on the held-out files."""
    model.eval()
    losses: list[float] = [
        model(*corpus.validation(index, shape.rows, shape.length)).item()
        for index in range(VALIDATION_BATCHES)
    ]
    return sum(losses) / len(losses)


def explain(directory: Path, settings: Settings) -> dict[str, Any]:
    """What the trace of a protected run tells: noticed when, done what, decided by whom."""
    noticed: int | None = None
    actions: list[dict[str, Any]] = []
    decided = {str(source): 0 for source in Source}
    lowest_lr_factor = 1.0
    false_alarms = 0
    for record in Reader(directory).steps():
        decided[str(record.outcome.source)] += 1
        decision = record.decision
        lowest_lr_factor = min(lowest_lr_factor, decision.lr_factor)
        hot = decision.readings.spike_level >= HOT_LEVEL
        acted = record.outcome.executed is not Action.PROCEED
        if settings.fault == "none" or record.step < settings.fault_step:
            false_alarms += hot or acted
        elif noticed is None and (hot or acted):
            noticed = record.step - settings.fault_step
        if acted:
            actions.append(_action(record))
    return {
        "noticed_after_steps": noticed,
        "actions": actions,
        "decided_by": decided,
        "lowest_lr_factor": lowest_lr_factor,
        "false_alarms": false_alarms,
    }


def _action(record: StepRecord) -> dict[str, Any]:
    decision = record.decision
    action: dict[str, Any] = {
        "action": record.outcome.executed.name.lower(),
        "step": record.step,
        "reason": decision.reason,
        "rule": decision.rule,
    }
    if decision.target is not None:
        action["target"] = decision.target
    return action


def _tell(message: dict[str, Any]) -> None:
    print(codec.to_json(message).decode(), flush=True)


def main() -> int:
    """Run what the one argument says."""
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    _tell({"result": train(Settings.from_json(sys.argv[1]))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
