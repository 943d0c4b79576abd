"""`sentinel demo`: train a small GPT, break it in four ways, and see what sentinel saves.

    python -m sentinel_hooks.demo [--json FILE] [--seed N] [--worlds nan,garbage] [--quick]

Every world is trained twice, unprotected and protected, by real processes (`train.py`), side by
side, with a real sidecar that decides for the protected one. The pieces, in the order in which
they are used: `corpus` (the text), `model` (the GPT), `faults` (what goes wrong), `train` (one
run, as a user would write it), `sidecar` (start it, ask it), `runner` (all runs, and the
progress), `table` (what came out).
"""
