"""How many replicas a load takes: a discrete-event simulation of the server, fed with measured stage times.

    times, mix = from_run(folder), mix_of_run(folder)  # of a load test at a low rate
    plan(times, rate, mix, limits).replicas

What is simulated is what the code does: in-flight batching of the language model, prompts fed between its
steps, chunks of a stream as soon as there are tokens for them, turns of the flow with first sounds first,
other stages that wait for these, and cores that all of it shares. What is not: memory, text that comes by
pieces, listeners who leave.
"""

from cosytriton_loadtests.planner.autoscaling import Policy, Scaled, Surge, recommend, scale
from cosytriton_loadtests.planner.calibration import from_run, mix_of, mix_of_run
from cosytriton_loadtests.planner.planning import Planning, PlanOptions, make_plan
from cosytriton_loadtests.planner.replica import Speech
from cosytriton_loadtests.planner.replicas import Outlook, Plan, capacity, look_out, plan
from cosytriton_loadtests.planner.stage_times import Cost, StageTimes, from_bench

__all__ = [
    "Cost",
    "Outlook",
    "Plan",
    "PlanOptions",
    "Planning",
    "Policy",
    "Scaled",
    "Speech",
    "StageTimes",
    "Surge",
    "capacity",
    "from_bench",
    "from_run",
    "look_out",
    "make_plan",
    "mix_of",
    "mix_of_run",
    "plan",
    "recommend",
    "scale",
]
