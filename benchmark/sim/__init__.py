"""Studies made with the simulator (``laps_plan.sim``).

python -m benchmark.sim.rules      what each rule of the policy is worth: one at a time is taken out
python -m benchmark.sim.colocated  servers that decode, too: LAPS against the best of SGLang's settings
python -m benchmark.sim.goodput    the highest rate at which requests meet objectives of their own
python -m benchmark.sim.anything   workloads that nobody has chosen: LAPS against the best of stock in hindsight
python -m benchmark.sim.quotes     quoted times to first token against what became of them
"""
