"""Studies made with the simulator (``laps_plan.sim``).

python -m benchmark.sim.rules      worth of each rule of the policy: rules are taken out one at a time
python -m benchmark.sim.colocated  servers that also decode: LAPS against the best of SGLang's settings
python -m benchmark.sim.goodput    highest rate at which requests meet their own objectives
python -m benchmark.sim.anything   random workloads: LAPS against the stock setting that is best in hindsight
python -m benchmark.sim.anything_colocated  the same on servers that also decode
python -m benchmark.sim.anything_fleet  the same on ranks that plan together, and behind the router
python -m benchmark.sim.quotes     quoted times to first token against the outcomes
"""
