"""Flags are told: in the log once, in status() as long as they are open, with names of layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sentinel_hooks
from sentinel.cli.main import main
from sentinel.core import incidents
from sentinel.core.policy import Policy
from sentinel.core.state import Ledger
from sentinel.core.types import Severity
from sentinel_hooks import Session, Signals, telling
from sentinel_hooks.layers import LayerTable
from sentinel_hooks.status import named


class Uneven(nn.Module):
    """Four layers of the same kind, one of which learns far too fast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def _train(tmp_path: Path, steps: int) -> Session:
    torch.manual_seed(7)
    model = Uneven()
    fast = list(model.blocks[2].parameters())
    others = [p for i in (0, 1, 3) for p in model.blocks[i].parameters()]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": fast, "lr": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=1e-4)
    session = sentinel_hooks.attach(
        model=model,
        optimizer=optimizer,
        sidecar=None,
        run_id="r7",
        run_dir=tmp_path,
        signals=Signals(every=1),
    )
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 8)
        loss = F.mse_loss(model(x), x.sin())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return session


def test_a_flag_that_fires_is_one_line_with_its_layer_and_advice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="sentinel_hooks"):
        session = _train(tmp_path, 60)
        session.detach()
    (line,) = [m for m in caplog.messages if "flag=update_ratio" in m]
    assert line.startswith("flag run=r7 step=")
    assert " layers=blocks.2 advice=" in line
    assert dict(session.status().counters.flags)["update_ratio"] >= 1


def test_status_and_replay_name_the_layers_of_an_incident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = _train(tmp_path, 60)
    text = str(session.status())
    assert "    layers: blocks.2" in text, text
    session.detach()
    assert main(["replay", str(tmp_path / "r7")]) == 0
    out = capsys.readouterr().out
    assert "layers: blocks.2" in out, out


def _ledger(*keys: str) -> Ledger:
    ledger = Ledger()
    for step, key in enumerate(keys):
        ledger = incidents.touch(
            ledger, key, step, f"{key}: do something", Severity.WARNING, fire=True, layers=(0, 1)
        )
    return ledger


def test_status_has_all_open_incidents_before_the_newest_resolved_ones() -> None:
    ledger = _ledger("depth", "collapse", "headroom")
    for step in range(10, 20):
        ledger = incidents.touch(ledger, "level_shift", step, "up", Severity.WARNING, fire=True)
        ledger = incidents.resolve(ledger, "level_shift", step)
    ledger = incidents.touch(ledger, incidents.INSTABILITY, 30, "hot", Severity.WARNING)
    shown = telling.incidents(ledger)
    assert [i.key for i in shown[:4]] == ["depth", "collapse", "headroom", "instability"]
    assert [i.resolved for i in shown[4:]] == [17, 18, 19]


def test_an_incident_is_told_once_and_what_was_done_is_none_of_the_flags() -> None:
    table = LayerTable.of([Uneven()]).layers
    before = _ledger("depth")
    assert telling.flags(Ledger(), before, table) == [
        "flag=depth layers=blocks.0, blocks.1 advice=depth: do something"
    ]
    after = incidents.touch(before, "depth", 9, "more", Severity.WARNING, fire=True, layers=(2,))
    assert telling.flags(before, after, table) == []
    hot = incidents.touch(after, incidents.INSTABILITY, 9, "hot", Severity.CRITICAL, fire=True)
    assert telling.flags(after, hot, table) == []


def test_many_flags_in_one_step_are_a_bounded_number_of_lines() -> None:
    table = LayerTable.of([Uneven()]).layers
    keys = ("depth", "collapse", "headroom", "throughput", "norm_band", "loss_scale")
    lines = telling.flags(Ledger(), _ledger(*keys), table)
    assert len(lines) == telling.FLAGS + 1
    assert "throughput, norm_band, loss_scale" in lines[-1]


@pytest.mark.parametrize("key", ["norm_band", "level_shift"])
def test_a_flag_whose_finding_is_a_number_alone_is_told_with_advice_too(key: str) -> None:
    ledger = incidents.touch(Ledger(), key, 0, "a number", Severity.WARNING, fire=True)
    (line,) = telling.flags(Ledger(), ledger, ())
    assert len(line) > len(f"flag={key} advice=a number: ") + 20


def test_of_many_layers_the_first_are_named_and_the_rest_counted() -> None:
    names = {i: f"blocks.{i}" for i in range(9)}
    assert named((3, 1, 2, 0, 4), names) == "blocks.3, blocks.1, blocks.2, +2"
    ledger = _ledger("depth")
    (incident,) = ledger.incidents
    far = replace(incident, layers=(99,))
    assert telling.layer_names((far,), LayerTable.of([Uneven()]).layers) == {}
    assert named((99,), {}) == "layer 99"


class Named(nn.Module):
    """Blocks whose names say nothing of their order."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        for name in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")[:blocks]:
            self.add_module(name, nn.Linear(4, 4))


def test_a_model_whose_blocks_cannot_be_made_out_is_told_that_its_depth_is_not_judged() -> None:
    (spot,) = telling.of_the_depth(LayerTable.of([Named(6)]), Policy())
    assert spot.what.startswith("depth and residual_gain are not judged: of the names of 6 layers")
    assert "4 and 2 blocks are needed" in spot.what
    assert "nn.ModuleList" in spot.way_out
    assert "block_0" in spot.way_out


def test_numbered_blocks_small_models_and_rules_that_are_off_are_no_blind_spot() -> None:
    assert telling.of_the_depth(LayerTable.of([Uneven()]), Policy()) == []
    assert telling.of_the_depth(LayerTable.of([Named(3)]), Policy()) == []
    two = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
    assert telling.of_the_depth(LayerTable.of([two]), Policy()) == []
    off = Policy.parse('[rules]\ndepth = { mode = "off" }\nresidual_gain = { mode = "off" }', "off")
    assert telling.of_the_depth(LayerTable.of([Named(6)]), off) == []


def test_stages_named_by_number_are_no_blind_spot() -> None:
    stages = nn.Module()
    for i in range(4):
        stages.add_module(f"layer{i}", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert telling.of_the_depth(LayerTable.of([stages]), Policy()) == []


def test_status_says_that_depth_is_not_judged(tmp_path: Path) -> None:
    model = Named(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path
    ) as session:
        assert "blind spot: depth and residual_gain are not judged" in str(session.status())


class Pair(nn.Module):
    """A block that hands on something beside its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(), self.lin(x)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            _, x = block(x)
        return x


def test_status_notes_which_of_several_outputs_is_measured(tmp_path: Path) -> None:
    model = Pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sentinel_hooks.attach(
        model=model, optimizer=optimizer, sidecar=None, run_dir=tmp_path
    ) as session:
        assert session.status().notes == ()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        text = str(session.status())
    assert "  note: activations of blocks.0, blocks.1, blocks.2 and 1 more are those of" in text
    assert "their output's [1], of 2 tensors the first of the shape of its input" in text
