"""Attaching to a script that does not mention us: `sentinel run --attach -- python train.py`.

    sitecustomize.py     found through PYTHONPATH by every Python process of the run; imports
                         nothing heavy; when torch's optimizers are imported, calls watch()
    watch()              the first optimizer step of the process attaches
    finding.find(o)      the models, optimizers and scaler that this step belongs to

The objects are looked for among all that are alive, at the one moment when they must be there: the
first optimizer.step(). What was found is said; when no model is found, nothing at all is done, and
that is said too.
"""
