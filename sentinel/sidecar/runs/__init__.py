"""The runs a sidecar knows: who writes each, its copy of their engine states, what it answers.

    runs.Runs              all of it, as routes, jobs and people use it
    run.Run                one run, made of:
      mirror.Mirror        the copy of its trainer's engine state: follows, is compared, decides
      figures.Figures      what it has counted and measured, for readers
      orders.Orders        people's orders and what became of them
      session.Session      of a trainer that speaks JSON: its engine's state lives here alone
    writers.Writers        who may write: registering, fences, second writers
    reports.Reports        what the writer says: steps, its state, its end
    json_trainers          the same for trainers that speak JSON
    sessions.Sessions      which of several of those may write
    recording.Recording    a report's way onto the disk, and into Figures
    chronicle.Chronicle    what became of a run, for the database, for listeners, for Grafana
    comeback.Comeback      what an earlier start of the sidecar has left
    registry.Registry      the runs by name
    bounds                 what a trainer may say
    views                  a run as JSON, for people

Nobody calls up, and whoever works on a run knows only those it was given (import contracts 7, 8).
"""

from sentinel.sidecar.runs.figures import Histogram, Row
from sentinel.sidecar.runs.json_trainers import next_step
from sentinel.sidecar.runs.mirror import Mirror
from sentinel.sidecar.runs.orders import Order
from sentinel.sidecar.runs.refusal import RefusedError
from sentinel.sidecar.runs.run import CADENCES, Run
from sentinel.sidecar.runs.runs import COMMAND_TTL_S, Runs
from sentinel.sidecar.runs.session import Claim
from sentinel.sidecar.runs.sessions import SESSION_HEADER
from sentinel.sidecar.runs.views import details, summary

__all__ = [
    "CADENCES",
    "COMMAND_TTL_S",
    "SESSION_HEADER",
    "Claim",
    "Histogram",
    "Mirror",
    "Order",
    "RefusedError",
    "Row",
    "Run",
    "Runs",
    "details",
    "next_step",
    "summary",
]
