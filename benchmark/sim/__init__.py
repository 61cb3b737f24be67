"""A discrete-event simulator of prefill servers: the policies are those that are served, only time is replaced.

python -m benchmark.sim            one simulation, its table
python -m benchmark.sim.roofline   the analytic profiles in profiles/
python -m benchmark.sim.validate   simulated against measured on this CPU; writes profiles/cpu.json
python -m benchmark.sim.paper      the paper's tables again
python -m benchmark.sim.ablation   thresholds, windows, shares, 1 to 1,000 instances, overload
"""
