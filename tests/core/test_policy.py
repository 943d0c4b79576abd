"""Policies: what is left out keeps its default, what makes no sense is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sentinel.core.errors import ConfigError
from sentinel.core.policy import SHIPPED, Policy
from sentinel.core.types import Mode


@pytest.mark.parametrize("name", ["default", "observe"])
def test_shipped_policies_differ_from_the_defaults_in_name_and_mode_only(name: str) -> None:
    policy = Policy.load(name)
    assert policy.name == name
    assert dataclasses.replace(policy, name="default", mode=Mode.ACT) == Policy()


def test_the_policy_for_moving_objectives_differs_in_sizes_only() -> None:
    policy, default = Policy.load("rl"), Policy()
    assert set(SHIPPED) == {"default", "observe", "rl"}
    assert (policy.name, policy.mode, policy.rules) == ("rl", Mode.ACT, default.rules)
    differs = {
        f.name
        for f in dataclasses.fields(policy)
        if getattr(policy, f.name) != getattr(default, f.name)
    }
    assert differs == {"name", "grad_norm", "spike", "level_shift"}


def test_a_rule_keeps_the_defaults_of_that_rule() -> None:
    policy = Policy.parse('[rules.loss_spike]\nmode = "observe"')
    assert policy.rules.loss_spike.mode is Mode.OBSERVE
    assert policy.rules.loss_spike.for_steps == 4
    assert policy.rules.loss_spike.cooldown == 16


def test_a_file_is_read_and_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "careful.toml"
    path.write_text("[grad_norm]\nfactor = 5\n")
    policy = Policy.load(path)
    assert (policy.name, policy.grad_norm.factor) == ("careful", 5.0)


def test_what_to_dict_gives_is_the_same_policy_again() -> None:
    policy = Policy.parse("[lr]\ncut = 0.25\n[rules.grad_norm]\nfor = 2\n", "mine")
    again = Policy.from_dict(policy.to_dict())
    assert again == policy


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[grad_norm]\nfaktor = 5", r"grad_norm\.faktor is not a setting; grad_norm has: factor"),
        ("speed = 5", r"speed is not a setting; the policy has: .*grad_norm"),
        ("[rules.grad_nrm]", r"rules\.grad_nrm is not a setting; rules has: .*grad_norm"),
        ("[grad_norm]\nfactor = 'ten'", r"grad_norm\.factor must be a number, got 'ten'"),
        ("[grad_norm]\nfactor = true", r"grad_norm\.factor must be a number, got True"),
        ("[grad_norm]\nfactor = nan", r"grad_norm\.factor must .*got nan"),
        ("[grad_norm]\nfactor = inf", r"grad_norm\.factor must .*got inf"),
        ("[spike]\nwarmup = 99", r"spike\.warmup must .*64.*got 99"),
        ("[skip]\nin_a_row = 0", r"skip\.in_a_row must lie between 1 and 10000, got 0"),
        ("[skip]\nin_a_row = 2.5", r"skip\.in_a_row must be a whole number, got 2\.5"),
        ("[skip]\nin_window = 501", r"at most skip\.window \(500 steps\), got 501"),
        ("[lr]\ncut = 1.5", r"lr\.cut must lie between 0\.001 and 1, got 1\.5"),
        ("[canary]\nmode = 'maybe'", r"canary\.mode must be one of on, off, got 'maybe'"),
        ("mode = 'off'", r"mode must be 'act' or 'observe', got 'off'"),
        ("mode = 'Act'", r"mode must be one of act, observe, off, got 'Act'"),
        ("[rules.grad_norm]\nfor = 0", r"rules\.grad_norm\.for must lie between 1 and 10000"),
        ("[rules.grad_norm]\nmode = 1", r"rules\.grad_norm\.mode must be one of"),
        ("rules = 3", r"rules must be a table, got 3"),
        ("[snapshots]\nkeep = 0", r"snapshots\.keep must lie between 1 and 100, got 0"),
        ("[grad_norm\n", r"policy 'custom' is not valid TOML"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(toml: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy.parse(toml)


def test_a_missing_file_says_what_could_be_given_instead() -> None:
    with pytest.raises(ConfigError, match=r"one of default, observe, rl or a readable TOML file"):
        Policy.load("no/such/file.toml")


def test_a_mode_given_as_an_argument_wins() -> None:
    assert Policy().with_mode("observe").mode is Mode.OBSERVE
    assert Policy().with_mode(None).mode is Mode.ACT
    with pytest.raises(ConfigError, match="'act' or 'observe', got 'loud'"):
        Policy().with_mode("loud")
