"""What the engine and its record cost a training step.

    python -m tests.bench.bench_engine

Engine = decide + apply, readings included, on calm steps with full windows (the common case), each
step with a new observation, the state carried along. Beside it: the first and later steps of an
incident, the state hash, the frame as it goes to the sidecar, and the trace record as it goes to
disk (encoding, checksum and one write to the operating system; no fsync).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sentinel.core import engine
from sentinel.core.policy import Policy
from sentinel.core.state import State
from sentinel.core.types import (
    LAYER_BLOCK,
    LAYER_ROLE,
    Action,
    Decision,
    Observation,
    Outcome,
)
from sentinel.traces.recorder import Recorder
from sentinel.wire import codec
from tests.bench.timing import cpu_us, machine, per_item_us, table
from tests.support.simulated import Garbage, SimulatedTrainer

STEPS = 300
WARM = 400  # steps until every window is full
SIGNALS = (
    "layer_grad_norm",
    "layer_update_ratio",
    "layer_weight_norm",
    "layer_attention_max_logit",
    "layer_activation_rms",
    "layer_activation_absmax",
)
POLICY = Policy()
TARGETS = {0: 60.0, 200: 100.0, 2000: 300.0}


def observations(layers: int, start: int, count: int) -> list[Observation]:
    """A healthy run's observations; all signals measured at every step."""
    trainer = SimulatedTrainer(seed=1)
    trainer.run(start)
    rng = np.random.default_rng(1)
    centre = {"layer_update_ratio": 1e-3, "layer_attention_max_logit": 8.0}
    made = []
    for _ in range(count):
        trainer.step()
        observation = trainer.steps[-1].observation
        if layers:
            columns = {
                name: (centre.get(name, 1.0) * np.exp(rng.normal(0, 0.1, layers))).astype(
                    np.float32
                )
                for name in SIGNALS
            }
            observation = replace(observation, columns=columns)
            if not made:  # once, as the trainer tells it
                table = {
                    LAYER_BLOCK: np.arange(layers, dtype=np.float32) // 8,
                    LAYER_ROLE: np.arange(layers, dtype=np.float32) % 8,
                }
                observation = replace(observation, columns={**columns, **table})
        made.append(observation)
    return made


def warm_state(start: int) -> State:
    """The engine's state after `start` healthy steps."""
    trainer = SimulatedTrainer(seed=1)
    trainer.run(start)
    return trainer.state


def carry(state: State, seen: list[Observation]) -> State:
    """decide + apply over all of them."""
    for observation in seen:
        decision = engine.decide(state, observation, POLICY)
        applied = decision.action is Action.PROCEED
        outcome = Outcome(observation.step, decision.action, applied)
        state = engine.apply(state, observation, decision, outcome, POLICY)
    return state


def engine_us(layers: int) -> float:
    """decide + apply + readings, per step."""
    before = 64 if layers else 0  # the layers' bands warm up too
    made = observations(layers, WARM - before, before + STEPS)
    state, seen = carry(warm_state(WARM - before), made[:before]), made[before:]

    def make() -> Callable[[], State]:
        return lambda: carry(state, seen)

    return per_item_us(make, STEPS)


def incident_us() -> float:
    """The same for the 20 hot steps of a garbage block."""
    trainer = SimulatedTrainer(seed=1, faults=[Garbage(WARM, 20)])
    trainer.run(WARM)
    state = trainer.state
    trainer.run(20)
    seen = [s.observation for s in trainer.steps[WARM:]]

    def make() -> Callable[[], None]:
        def run() -> None:
            for _ in range(10):
                carry(state, seen)

        return run

    return per_item_us(make, 200)


def one_step(layers: int) -> tuple[State, Observation, Decision, Outcome]:
    """A calm step and what belongs to it."""
    first, observation = observations(layers, WARM, 2)
    state = carry(warm_state(WARM), [first])
    decision = engine.decide(state, observation, POLICY)
    return state, observation, decision, Outcome(observation.step, Action.PROCEED, True)


def beside_us(layers: int) -> tuple[float, float, float, float]:
    """(state hash, frame encoding, recording, bytes recorded) per step."""
    state, observation, decision, outcome = one_step(layers)
    hashing = cpu_us(lambda: codec.state_hash(state))
    framing = cpu_us(lambda: (codec.encode_observation(observation), codec.encode_outcome(outcome)))
    with tempfile.TemporaryDirectory() as directory:
        recorder = Recorder(Path(directory), run="bench", policy=POLICY, state=state)
        before = recorder.written_bytes
        recorder.step(observation, decision, outcome, state)
        size = recorder.written_bytes - before
        disk = cpu_us(lambda: recorder.step(observation, decision, outcome, state), calls=200)
        recorder.close()
    return hashing, framing, disk, size


def main() -> None:
    """Print the table."""
    rows = []
    for layers, target in TARGETS.items():
        hashing, framing, disk, size = beside_us(layers)
        rows.append(
            (
                "scalars only" if not layers else f"{layers} layers x {len(SIGNALS)} signals",
                f"{engine_us(layers):.1f}",
                f"{target:.0f}",
                f"{hashing:.1f}",
                f"{framing:.1f}",
                f"{disk:.1f}",
                f"{size:.0f}",
            )
        )
    rows.append(("a step of an incident", f"{incident_us():.1f}", "", "", "", "", ""))
    head = ("us of CPU a step", "engine", "target", "hash", "frame", "record", "bytes on disk")
    print(table(f"Engine and its record ({machine()})", rows, head))


if __name__ == "__main__":
    main()
