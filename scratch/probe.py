import asyncio, json, random, sys, time, urllib.request
from pathlib import Path
from benchmark.rig import model, servers, load
shape=model.SLICED
ck=model.make(Path("/work/main/out/models"), shape)
loop=sys.argv[1]; chunk=sys.argv[2]; args=sys.argv[3:]
extra=("--disable-overlap-schedule",) if loop=="normal" else ()
tp=("--tp-size","2") if "tp2" in args else ()
env={"OMP_NUM_THREADS":"1",**servers.KEEP_MEMORY}
if tp: env["SGLANG_CPU_OMP_THREADS_BIND"]="0|1"
laps=("--enable-laps-scheduler",) if "laps" in args else ("--schedule-policy",args[0])
s=servers.prefill(ck, Path(f"/tmp/probe-{loop}-{sys.argv[3]}.log"), "--chunked-prefill-size",chunk,"--max-total-tokens","65536","--disable-radix-cache",*laps,*extra,*tp,env=env)
def get(p): return json.load(urllib.request.urlopen(s.url+p,timeout=60))
def ids(seed,n):
    r=random.Random(seed); return [r.randrange(3,2000) for _ in range(n)]
async def main():
    async with load.session() as http:
        async def one(i,n,delay):
            await asyncio.sleep(delay); t=time.perf_counter()
            async with http.post(s.url+"/generate",json={"input_ids":ids(i,n),"sampling_params":{"max_new_tokens":1,"temperature":0},"bootstrap_host":servers.FAKE_BOOTSTRAP_HOST,"bootstrap_port":1,"bootstrap_room":random.getrandbits(60)}) as r:
                a=await r.json(); assert r.status==200,a
                return n,time.perf_counter()-t,a["output_ids"][0]
        # warm: teach the model
        for n in (16,64,128,256,512,1024,2048,3000)*6: await one(n,n,0)
        print(json.dumps({k:get("/laps_status")[k] for k in ("latency_model","slices")}) if "laps" in args else "")
        for n in (64,2048,4000):
            ts=[]
            for _ in range(7): ts.append((await one(n,n,0))[1])
            print("lone",n,round(1e3*sorted(ts)[3],1))
        rng=random.Random(5)
        jobs=[(1000+i,rng.choice((500,1000,2000,3000)),i*1.0+rng.random()*.1) for i in range(12)]+[(5000+i,rng.randint(16,128),i*0.15+rng.random()*.05) for i in range(80)]
        t=time.time(); out=await asyncio.gather(*(one(*j) for j in jobs))
        sh=sorted(o[1] for o in out if o[0]<=256); lo=sorted(o[1] for o in out if o[0]>256)
        q=lambda x,p: round(1e3*x[int(p*(len(x)-1))],1)
        print("short P50/P90/max",q(sh,.5),q(sh,.9),q(sh,1),"long",q(lo,.5),q(lo,.9),q(lo,1),"took",round(time.time()-t,2),"mean",round(1e3*sum(o[1] for o in out)/len(out),1))
        print("hash",hash(tuple(o[2] for o in out)))
        if "laps" in args:
            st=get("/laps_status"); print(json.dumps({k:st[k] for k in ("preemption","fairness","totals")}))
with s:
    s.ready(); asyncio.run(main()); time.sleep(2)
print([l for l in open(f"/tmp/probe-{loop}-{sys.argv[3]}.log") if "leak" in l.lower() or "exception" in l.lower()][:3])
