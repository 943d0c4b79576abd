"""Attaching to a script that does not mention us: `sentinel run --attach -- python train.py`.

    sitecustomize.py     found through PYTHONPATH by every Python process of the run; imports
                         nothing heavy; when torch's optimizers are imported, puts in a hook
    stepping.on_step(o)  before every optimizer step: the first attaches, later ones may do so anew
    judging.judge(seen)  whether an optimizer that comes later is a partner or an heir of the first
    finding.find(o)      the models, optimizers and scaler that this step belongs to

The objects are looked for among all that are alive, at the one moment when they must be there: an
optimizer.step(). What was found is said; when no model is found, nothing at all is done, and that
is said too.
"""
