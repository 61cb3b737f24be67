import sys; sys.argv=[sys.argv[0],*sys.argv[1:]]
exec(open("scratch/proto.py").read().split('if __name__')[0])
from benchmark.sim.variants import VARIANTS, run as vrun
for l in (loads if sys.argv[1]=="all" else sys.argv[1].split(",")):
    print("--",l)
    print(line("fcfs",run(policies()["fcfs"],loads[l](),prof)))
    print(line("spf2048",run(policies()["spf2048"],loads[l](),prof)))
    print(line("Q",run(policies()["Q"],loads[l](),prof)))
    o=vrun(VARIANTS["laps"],loads[l](),prof,chunk=8192); o.s=None; print(line("laps",o),flush=True)
