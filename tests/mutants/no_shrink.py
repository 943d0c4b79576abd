"""A pytest plugin: the first failing example is enough, nobody reads the smallest one."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "no shrink",
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("no shrink")
