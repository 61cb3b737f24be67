"""Benchmarks, and the rig (models, servers, load) that they share with the demo and the tests.

report.py            runs the steps of results/steps.py, one command each, and writes benchmark/report
serve                variants of a prefill server under the same load; headline, slices
router, colocated.py the routers; servers that also decode
fidelity             simulator and planner against real servers on emulated devices
sim                  studies in the simulator alone
gpu                  measurements on a machine with a GPU
demo*.py             ./run demo
load, rig, results   clients and prompts; models, devices and servers; figures, bars and pieces
"""
