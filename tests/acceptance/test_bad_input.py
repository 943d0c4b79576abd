# ruff: noqa: E501  (messages stand as they are said)
"""Every bad input to attach() and to policies: refused by field, bound, value and way out.

The messages are part of the product: each stands here word for word. What is refused must not have
touched anything of the user's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
import sentinel_hooks
from sentinel.core.errors import ConfigError, SentinelError
from sentinel.core.policy import LrCutConfig, Policy, RuleConfig, Rules, SkipConfig
from sentinel_hooks import AttachError, Signals, Snapshots

pytestmark = pytest.mark.torch


class World:
    """A sound pair, a second sound pair, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.other = nn.Linear(3, 1)
        self.other_optimizer = torch.optim.SGD(self.other.parameters(), lr=0.1)

    def file(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content)
        return path

    def untouched(self) -> list[Any]:
        """What attach would have changed."""
        clip = torch.nn.utils.clip_grad
        return [
            dict(vars(self.model)),
            {k: len(v) if "hooks" in k else v for k, v in vars(self.optimizer).items()},
            torch.autograd.backward,
            clip._get_total_norm,
            clip.clip_grad_value_,
            dict(os.environ),
        ]


Case = tuple[Callable[[World], dict[str, Any]], str]
A_MODEL = (
    "model must be a torch.nn.Module or a list of them, got {}; give the object that the loop calls"
)
AN_OPTIMIZER = (
    "optimizer must be a torch.optim.Optimizer, an object that holds one as .optimizer, or a list "
    "of them, got {}; give the object that the loop steps"
)
A_SCALER = (
    "grad_scaler must be a torch.amp.GradScaler, got {}; give the object that the loop calls "
    "step() and update() on, or leave it out"
)
A_SCHEDULER = (
    "lr_scheduler must be an object with step(), got {}; give the scheduler that the loop steps, "
    "or leave it out"
)
EXTRA = (
    "extra_state must be a list of objects with state_dict() and load_state_dict(), got {}; for a "
    "single one: extra_state=[it]"
)
EXTRA_ITEM = (
    "extra_state must hold objects with state_dict() and load_state_dict(), got {}; wrap what has "
    "other names in an object with these two"
)
A_RUN = (
    "{} must be usable as a directory name: 1 to 200 bytes, printable, without / and \\, got {!r}; "
    "leave it out for a new one"
)
A_PAUSE = (
    "run_id must not be 'PAUSE': whatever has that name in run_dir pauses every run there; give "
    "this one another id"
)
A_FOLDER = (
    "run_dir must be the path of a folder, got {!r}; for the current one give '.', to write no "
    "trace record=False"
)
A_SIDECAR = "sidecar must be http://host:port[/path] or unix:///path/to/socket, got {!r}"
SIDECAR_TYPE = "sidecar must be 'auto', None, http://host:port or unix:///path/to/socket, got {!r}"
A_FUNCTION = "{0} must be a function without arguments, got {1}; wrap it: {0}=lambda: ..."
POLICY_TYPE = (
    "policy must be one of default, observe, rl, the path of a TOML file or a Policy, got {!r}; a "
    "table becomes one by Policy.from_dict()"
)
ALONE = {"model": None, "optimizer": None}
NAMED = "attach(model=..., optimizer=..., lr_scheduler=..., grad_scaler=...)"
UNKNOWN = (
    "attach(trainer) does not know {}; it knows HF Trainer, Lightning Trainer, "
    "accelerate.Accelerator and their subclasses. Pass the objects that your loop uses: "
    f"{NAMED}; or teach it this class with sentinel_hooks.register_adapter(...), see "
    "docs/adapters.md"
)


def _emptied(w: World) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(w.other.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = []
    return optimizer


ATTACH: dict[str, Case] = {
    # -- the objects
    "nothing": (
        lambda w: {"model": None, "optimizer": None},
        "model is missing: pass the module(s) that the loop calls: attach(model=..., ...)",
    ),
    "no model": (
        lambda w: {"model": None},
        "model is missing: pass the module(s) that the loop calls: attach(model=..., ...)",
    ),
    "no optimizer": (
        lambda w: {"optimizer": None},
        "optimizer is missing: pass the torch optimizer(s) that the loop steps",
    ),
    "empty list of models": (
        lambda w: {"model": []},
        "model is an empty list: pass the module(s) that the loop calls: attach(model=..., ...)",
    ),
    "empty list of optimizers": (
        lambda w: {"optimizer": ()},
        "optimizer is an empty list: pass the torch optimizer(s) that the loop steps",
    ),
    "model by name": (lambda w: {"model": "gpt2"}, A_MODEL.format("builtins.str")),
    "model class": (lambda w: {"model": nn.Linear}, A_MODEL.format("the class Linear")),
    "parameters for model": (
        lambda w: {"model": w.model.parameters()},
        A_MODEL.format("torch.nn.parameter.Parameter"),
    ),
    "state dict for model": (
        lambda w: {"model": w.model.state_dict()},
        A_MODEL.format("torch.Tensor"),
    ),
    "a hole among models": (
        lambda w: {"model": [w.model, None]},
        A_MODEL.format("builtins.NoneType"),
    ),
    "swapped": (
        lambda w: {"model": w.optimizer, "optimizer": w.model},
        A_MODEL.format("torch.optim.sgd.SGD"),
    ),
    "the same model twice": (
        lambda w: {"model": [w.model, w.model]},
        "model holds the same module twice; give each one once",
    ),
    "optimizer by name": (lambda w: {"optimizer": "adam"}, AN_OPTIMIZER.format("builtins.str")),
    "optimizer class": (
        lambda w: {"optimizer": torch.optim.SGD},
        AN_OPTIMIZER.format("the class SGD"),
    ),
    "a hole among optimizers": (
        lambda w: {"optimizer": [w.optimizer, None]},
        AN_OPTIMIZER.format("builtins.NoneType"),
    ),
    "the same optimizer twice": (
        lambda w: {"optimizer": [w.optimizer, w.optimizer]},
        "optimizer holds the same optimizer twice; give each one once",
    ),
    # -- what does not belong together
    "model of another optimizer": (
        lambda w: {"model": w.other},
        (
            "optimizer and model share no parameter: was the model replaced (moved, compiled with "
            "copies, loaded anew) after the optimizer was made? Build the optimizer from the model "
            "that is trained"
        ),
    ),
    "a parameter in two optimizers": (
        lambda w: {"optimizer": [w.optimizer, torch.optim.SGD([w.model.weight], lr=0.1)]},
        (
            "weight is a parameter of optimizer 0 and of optimizer 1: one step would move it twice; "
            "attach the one that is stepped now, and detach() and attach() when the loop changes over "
            "to the other"
        ),
    ),
    "optimizer without parameters": (
        lambda w: {"optimizer": [w.optimizer, _emptied(w)]},
        (
            "optimizer 1 has no parameters: attach after it was given some (add_param_group), or leave "
            "it out"
        ),
    ),
    "model without parameters": (
        lambda w: {"model": nn.Identity()},
        "model has no parameters: there is nothing to watch; give the module that is trained",
    ),
    "scheduler of another optimizer": (
        lambda w: {"lr_scheduler": torch.optim.lr_scheduler.StepLR(w.other_optimizer, 1)},
        (
            "lr_scheduler (torch.optim.lr_scheduler.StepLR) moves the rate of an optimizer that is not "
            "given: give that one as optimizer=, or the scheduler that was made for the one given"
        ),
    ),
    "scheduler by name": (
        lambda w: {"lr_scheduler": ["cosine"]},
        A_SCHEDULER.format("builtins.str"),
    ),
    "scheduler class": (
        lambda w: {"lr_scheduler": torch.optim.lr_scheduler.StepLR},
        A_SCHEDULER.format("the class StepLR"),
    ),
    "scaler as a flag": (lambda w: {"grad_scaler": True}, A_SCALER.format("builtins.bool")),
    "scaler class": (
        lambda w: {"grad_scaler": torch.amp.GradScaler},
        A_SCALER.format("the class GradScaler"),
    ),
    "an optimizer for scaler": (
        lambda w: {"grad_scaler": w.optimizer},
        A_SCALER.format("torch.optim.sgd.SGD"),
    ),
    # -- state and functions
    "extra state without a list": (
        lambda w: {"extra_state": w.other},
        EXTRA.format("torch.nn.modules.linear.Linear"),
    ),
    "extra state None": (lambda w: {"extra_state": None}, EXTRA.format("builtins.NoneType")),
    "extra state by name": (
        lambda w: {"extra_state": {"ema": w.other}},
        EXTRA.format("builtins.dict"),
    ),
    "extra state without state_dict": (
        lambda w: {"extra_state": [w.other, 3]},
        EXTRA_ITEM.format("builtins.int"),
    ),
    "extra state class": (
        lambda w: {"extra_state": [nn.Linear]},
        EXTRA_ITEM.format("the class Linear"),
    ),
    "loss_fn not callable": (
        lambda w: {"loss_fn": 0.5},
        (
            "loss_fn must be a function or a loss module, got float; leave it out if the model returns "
            "its loss"
        ),
    ),
    "loss_fn class": (
        lambda w: {"loss_fn": nn.MSELoss},
        (
            "loss_fn must be a function or a loss module, got the class MSELoss; give the object that "
            "the loop calls: MSELoss(...)"
        ),
    ),
    "batch_id a name": (lambda w: {"batch_id": "b7"}, A_FUNCTION.format("batch_id", "'b7'")),
    "batch_id with an argument": (
        lambda w: {"batch_id": lambda batch: str(batch)},
        A_FUNCTION.format(
            "batch_id",
            "one that cannot be called so (missing a required argument: 'batch')",
        ),
    ),
    "norm_fn a number": (lambda w: {"norm_fn": 1.0}, A_FUNCTION.format("norm_fn", "1.0")),
    "signals of another type": (
        lambda w: {"signals": {"layer_grad_norm": True}},
        "signals must be a sentinel_hooks.Signals, got dict; make one: Signals(...)",
    ),
    "snapshots as a flag": (
        lambda w: {"snapshots": False},
        "snapshots must be a sentinel_hooks.Snapshots, got bool; make one: Snapshots(...)",
    ),
    # -- names and places
    "policy misspelled": (
        lambda w: {"policy": "defualt"},
        (
            "policy must be one of default, observe, rl or a readable TOML file, got 'defualt' "
            "([Errno 2] No such file or directory: 'defualt')"
        ),
    ),
    "policy a number": (lambda w: {"policy": 3}, POLICY_TYPE.format(3)),
    "policy a table": (
        lambda w: {"policy": {"mode": "act"}},
        POLICY_TYPE.format({"mode": "act"}),
    ),
    "policy None": (lambda w: {"policy": None}, POLICY_TYPE.format(None)),
    "mode unknown": (lambda w: {"mode": "loud"}, "mode must be 'act' or 'observe', got 'loud'"),
    "mode off": (
        lambda w: {"mode": "off"},
        "mode must be 'act' or 'observe', got 'off'; to stop, use detach()",
    ),
    "mode a number": (lambda w: {"mode": 1}, "mode must be 'act' or 'observe', got 1"),
    "sidecar without scheme": (
        lambda w: {"sidecar": "localhost:8700"},
        A_SIDECAR.format("localhost:8700"),
    ),
    "sidecar of another scheme": (
        lambda w: {"sidecar": "https://sidecar:8700"},
        A_SIDECAR.format("https://sidecar:8700"),
    ),
    "sidecar port out of bounds": (
        lambda w: {"sidecar": "http://localhost:99999"},
        A_SIDECAR.format("http://localhost:99999"),
    ),
    "sidecar without a path": (lambda w: {"sidecar": "unix://"}, A_SIDECAR.format("unix://")),
    "sidecar a port": (lambda w: {"sidecar": 8700}, SIDECAR_TYPE.format(8700)),
    "sidecar a flag": (lambda w: {"sidecar": True}, SIDECAR_TYPE.format(True)),
    "decide unknown": (
        lambda w: {"decide": "me"},
        "decide must be 'sidecar' or 'trainer', got 'me'",
    ),
    "decide empty": (lambda w: {"decide": ""}, "decide must be 'sidecar' or 'trainer', got ''"),
    "run_id a path": (lambda w: {"run_id": "a/b"}, A_RUN.format("run_id", "a/b")),
    "run_id the parent": (lambda w: {"run_id": ".."}, A_RUN.format("run_id", "..")),
    "run_id a number": (lambda w: {"run_id": 7}, A_RUN.format("run_id", 7)),
    "run_id empty": (lambda w: {"run_id": ""}, A_RUN.format("run_id", "")),
    "run_id of the pause": (lambda w: {"run_id": "PAUSE"}, A_PAUSE),
    "run_id of two lines": (lambda w: {"run_id": "a\nb"}, A_RUN.format("run_id", "a\nb")),
    "run_id too long": (lambda w: {"run_id": "é" * 101}, A_RUN.format("run_id", "é" * 101)),
    "run_id no text": (lambda w: {"run_id": "a\udcffb"}, A_RUN.format("run_id", "a\udcffb")),
    "run_dir a number": (lambda w: {"run_dir": 7}, A_FOLDER.format(7)),
    "run_dir empty": (lambda w: {"run_dir": ""}, A_FOLDER.format("")),
    "run_dir no path": (lambda w: {"run_dir": "a\0b"}, A_FOLDER.format("a\0b")),
    "record a word": (lambda w: {"record": "no"}, "record must be True or False, got 'no'"),
    # -- trainers
    "trainer unknown": (lambda w: {**ALONE, "trainer": 3}, UNKNOWN.format("builtins.int")),
    "trainer a class": (
        lambda w: {**ALONE, "trainer": World},
        "attach(trainer) was given the class World; give the object that trains: World(...)",
    ),
    "model in the trainer's place": (
        lambda w: {**ALONE, "trainer": w.model},
        (
            "attach(trainer) was given a model (torch.nn.modules.linear.Linear); name the objects: "
            f"{NAMED}"
        ),
    ),
    "trainer and its objects": (
        lambda w: {"trainer": World},
        (
            "attach() was given a trainer and model=; give the trainer, which knows its objects, or "
            "the objects without it"
        ),
    ),
    "webhook no address": (
        lambda w: {"webhook": "hooks.example/x"},
        (
            "webhook must be an address like https://host/path that takes a POST of JSON, got one without https://; "
            "leave it out for none"
        ),
    ),
}


@pytest.mark.parametrize("name", list(ATTACH))
def test_attach_refuses_it_word_for_word_and_touches_nothing(name: str, tmp_path: Path) -> None:
    world, (change, message) = World(tmp_path), ATTACH[name]
    given = {
        "model": world.model,
        "optimizer": world.optimizer,
        "sidecar": None,
        "run_dir": tmp_path / "runs",
        **change(world),
    }
    before = world.untouched()
    with pytest.raises(SentinelError) as caught:
        sentinel.attach(**given)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)
    assert world.untouched() == before
    assert list(tmp_path.iterdir()) == []
    # ... and the sound pair can be attached all the same.
    sentinel.attach(
        model=world.model, optimizer=world.optimizer, sidecar=None, run_dir=tmp_path
    ).detach()


def test_a_run_id_from_the_environment_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    monkeypatch.setenv("SENTINEL_RUN_ID", "jobs/7")
    with pytest.raises(AttachError) as caught:
        sentinel.attach(model=world.model, optimizer=world.optimizer, sidecar=None)
    assert str(caught.value) == A_RUN.format("$SENTINEL_RUN_ID", "jobs/7")


def test_an_unknown_keyword_is_refused_by_python_itself() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'scaler'"):
        sentinel.attach(scaler=None)


def test_the_second_attach_says_which_optimizer_and_the_first_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    given = {"model": world.model, "sidecar": None, "run_dir": tmp_path}
    with sentinel.attach(optimizer=world.optimizer, **given) as session:
        with pytest.raises(AttachError) as caught:
            sentinel.attach(optimizer=[world.other_optimizer, world.optimizer], **given)
        assert str(caught.value) == (
            "optimizer 1 is attached already; detach() the other session first, or use the one "
            "that is there"
        )
        world.model(torch.ones(2, 3)).sum().backward()
        world.optimizer.step()
        assert session.state.step == 1


def test_two_sessions_do_not_share_a_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    given = {"sidecar": None, "run_dir": tmp_path, "run_id": "r7"}
    with sentinel.attach(model=world.model, optimizer=world.optimizer, **given):
        with pytest.raises(AttachError) as caught:
            sentinel.attach(model=world.other, optimizer=world.other_optimizer, **given)
        assert str(caught.value) == (
            "run r7 is being trained by another session in this process; end it (or detach() its "
            "session) first, or give this one another run_id"
        )
        given["run_id"] = "r8"
        sentinel.attach(model=world.other, optimizer=world.other_optimizer, **given).detach()
    given["run_id"] = "r7"
    del world
    world = World(tmp_path)  # forgotten, not detached: its id is free again
    sentinel.attach(model=world.model, optimizer=world.optimizer, **given)
    del world
    world = World(tmp_path)
    sentinel.attach(model=world.model, optimizer=world.optimizer, **given).detach()


# ---------------------------------------------------------------- settings


SETTINGS: dict[str, tuple[Callable[[], object], str]] = {
    "share zero": (
        lambda: Snapshots(memory_share=0),
        "snapshots.memory_share must lie above 0 and be at most 1, got 0",
    ),
    "share a word": (
        lambda: Snapshots(disk_share="half"),  # type: ignore[arg-type]
        "snapshots.disk_share must be a number, got 'half'",
    ),
    "share nan": (
        lambda: Snapshots(memory_share=float("nan")),
        "snapshots.memory_share must lie above 0 and be at most 1, got nan",
    ),
    "keep none": (
        lambda: Snapshots(disk_keep=0),
        (
            "snapshots.disk_keep must be at least 1, got 0; to write nothing to disk, use "
            "Snapshots(disk=False)"
        ),
    ),
    "keep a half": (
        lambda: Snapshots(disk_keep=1.5),  # type: ignore[arg-type]
        "snapshots.disk_keep must be a whole number, got 1.5",
    ),
    "negative bytes": (
        lambda: Snapshots(disk_bytes=-1),
        "snapshots.disk_bytes must be at least 0, got -1; leave it out for no bound",
    ),
    "a flag that is none": (
        lambda: Snapshots(ram="yes"),  # type: ignore[arg-type]
        "snapshots.ram must be True or False, got 'yes'",
    ),
    "a signal that is none": (
        lambda: Signals(layer_grad_norm=1),  # type: ignore[arg-type]
        "signals.layer_grad_norm must be True or False, got 1",
    ),
    "a policy built with a word": (
        lambda: SkipConfig(in_a_row="ten"),  # type: ignore[arg-type]
        "skip.in_a_row must be a number, got 'ten'",
    ),
    "a policy built with a flag": (
        lambda: LrCutConfig(cut=True),
        "lr.cut must be a number, got True",
    ),
    "a rule built out of bounds": (
        lambda: Policy(rules=Rules(grad_norm=RuleConfig(for_steps=0))),
        "rules.grad_norm.for must lie between 1 and 10000, got 0",
    ),
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_setting_is_refused_word_for_word(name: str) -> None:
    make, message = SETTINGS[name]
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


POLICIES: dict[str, tuple[str, str]] = {
    "rule unknown": (
        "[rules.los_spike]\nmode = 'act'",
        (
            "rules.los_spike is not a setting; rules has: attention_logit, clip_pressure, collapse, "
            "depth, grad_norm, headroom, layer_band, layer_outlier, level_shift, loss_outlier, "
            "loss_period, loss_plateau, loss_scale, loss_spike, loss_swing, nonfinite_grad, "
            "nonfinite_loss, nonfinite_params, norm_band, norm_trend, residual_gain, "
            "residual_mixing, rising_together, skip_bound, stale_grads, throughput, update_ratio"
        ),
    ),
    "setting unknown": (
        "[canary]\nmargn = 0.1",
        "canary.margn is not a setting; canary has: age, margin, mode",
    ),
    "type": ("[spike]\nwindow = '64'", "spike.window must be a whole number, got '64'"),
    "a fraction": ("[rollback]\nbudget = 2.5", "rollback.budget must be a whole number, got 2.5"),
    "a flag for a number": ("[lr]\nhold = true", "lr.hold must be a whole number, got True"),
    "a word for a flag": (
        "[rollback]\nhalt_when_spent = 'no'",
        "rollback.halt_when_spent must be true or false, got 'no'",
    ),
    "a number for a table": ("grad_norm = 10", "grad_norm must be a table, got 10"),
    "a number for a list": (
        "[snapshots]\ndisk_at = 50",
        "snapshots.disk_at must be a list, got 50",
    ),
    "a word in a list": (
        "[snapshots]\ndisk_at = [50, 'x']",
        "snapshots.disk_at[1] must be a whole number, got 'x'",
    ),
    "a falling list": (
        "[snapshots]\ndisk_at = [100, 50]",
        (
            "snapshots.disk_at must be steps of at least 1, each greater than the one before, got "
            "[100, 50]; leave it empty ([]) to have snapshots.disk_every alone"
        ),
    ),
    "below": ("[skip]\nwindow = 0", "skip.window must lie between 1 and 1e+06, got 0"),
    "above": ("[lr]\ncut = 1.5", "lr.cut must lie between 0.001 and 1, got 1.5"),
    "nan": ("[canary]\nmargin = nan", "canary.margin must lie between 0 and 10, got nan"),
    "inf": ("[canary]\nmargin = inf", "canary.margin must lie between 0 and 10, got inf"),
    "against another": (
        "[skip]\nin_window = 600",
        "skip.in_window must be at most skip.window (500 steps), got 600",
    ),
    "mode": (
        "mode = 'on'",
        "mode must be one of act, observe, off, got 'on'",
    ),
    "mode off": (
        "mode = 'off'",
        "mode must be 'act' or 'observe', got 'off'; to stop, use detach()",
    ),
    "severity": (
        "[rules.loss_spike]\nseverity = 'bad'",
        "rules.loss_spike.severity must be one of info, warning, critical, got 'bad'",
    ),
    "broken": (
        "[skip",
        (
            "policy 'mine' is not valid TOML: Expected ']' at the end of a table declaration "
            "(at end of document)"
        ),
    ),
    "twice": (
        "[skip]\n[skip]",
        "policy 'mine' is not valid TOML: Cannot declare ('skip',) twice (at line 2, column 6)",
    ),
}


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_file_is_refused_word_for_word(name: str, tmp_path: Path) -> None:
    text, message = POLICIES[name]
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Policy.load(tmp_path / "mine.toml")
    assert str(caught.value) == message


def test_a_policy_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\0")
    whys = {
        tmp_path / "missing.toml": "[Errno 2] No such file or directory",
        tmp_path: "[Errno 21] Is a directory",
        tmp_path / "binary.toml": "'utf-8' codec can't decode byte 0xff in position 0",
        tmp_path / "a\0b": "embedded null byte",
    }
    for path, why in whys.items():
        with pytest.raises(ConfigError) as caught:
            Policy.load(path)
        start = (
            f"policy must be one of default, observe, rl or a readable TOML file, got {str(path)!r}"
        )
        assert str(caught.value).startswith(f"{start} ({why}")


def test_a_run_dir_that_is_a_file_costs_the_trace_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    place = world.file("taken", b"")
    session = sentinel_hooks.attach(
        model=world.model, optimizer=world.optimizer, sidecar=None, run_dir=place
    )
    world.model(torch.ones(2, 3)).sum().backward()
    world.optimizer.step()
    assert session.state.step == 1
    assert "the trace has holes: [Errno 20] Not a directory" in str(session.status())
    said = [record.message.split(" run=")[0] for record in caplog.records]
    assert said.count("the trace cannot be written") == 1
    session.detach()
    assert place.read_bytes() == b""
