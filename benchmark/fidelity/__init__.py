"""Simulator and planner against real servers on emulated devices, with the same arrivals.

python -m benchmark.fidelity.policies   stock and LAPS on one server
python -m benchmark.fidelity.fleet      one or several servers behind routers: the paper's claims
python -m benchmark.fidelity.planner    public traces, and laps-plan's predictions for them
./run bench groups                      data-parallel attention ranks that plan together
"""
