import sys
exec(open("scratch/proto.py").read().split('if __name__')[0])
from benchmark.sim.variants import VARIANTS, run as vrun
import sglang_laps.policy.packing as pk, sglang_laps.policy.gap as gp
N=12000
def one(l,tag,knobs,**mod):
    for k,v in mod.items():
        setattr(pk if hasattr(pk,k) else gp,k,v)
    o=vrun(VARIANTS["laps"],loads[l](),prof,chunk=8192,knobs=knobs); o.s=None; print(line(tag,o),flush=True)
    pk.AHEAD=2.0; gp.AIM=8.0; gp.WIDEST=8.0
for l in sys.argv[1].split(","):
    print("--",l); print(line("fcfs",run(policies()["fcfs"],loads[l](),prof)))
    one(l,"default",{})
    one(l,"guard .5",{"guard":.5}); one(l,"guard 0",{"guard":0.})
    one(l,"overhead .1",{"preempt_overhead":.1}); one(l,"overhead .25",{"preempt_overhead":.25})
    one(l,"AIM 4",{},AIM=4.0); one(l,"AIM 2",{},AIM=2.0); one(l,"AIM 4 W16",{},AIM=4.0,WIDEST=16.0)
    one(l,"AHEAD 4",{},AHEAD=4.0); one(l,"AHEAD 1",{},AHEAD=1.0)
    one(l,"fcfs order",{"order":"fcfs"})
