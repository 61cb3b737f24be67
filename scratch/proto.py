"""Prototype of the next policy, on the simulator's engine."""
from __future__ import annotations
import sys, time
from collections import deque
from pathlib import Path
ROOT = Path.cwd(); sys.path[:0] = [str(ROOT), str(ROOT/"python"), str(ROOT/"sgl-model-gateway/bindings/python/src"), "/work/shared/sketches"]
import preemption as sk
from benchmark.sim.engine import Events, Server, simulate
from benchmark.sim.request import Batch
from benchmark.sim.profile import Profile
from benchmark.sim.workload import *
SL=28; COST=50e-6
from sglang_laps.policy.gap import Gap
from sglang_laps.policy.guard import Guard
from sglang_laps.policy.packing import *
class Q:
    def __init__(self, chunk, model, *, overhead=.15, guard=.25, slice_s=.004, depth=2, kv=1<<40):
        self.room=chunk; self.c=model.coefficients; self.thr=256; self.slice_s=slice_s
        self.g=Gap(overhead); self.guard=Guard(guard); self.depth=depth
        self.short=deque(); self.longs=[]; self.stack=[]; self.lastmid=-9.; self.host_s=0.; self.waiting_tokens=0
        self.mids=0; self.kv=kv; self.inprog=set()
    def sec(self, parts): return self.c.seconds(sk.StepShape.of([(n,o) for _,n,o in parts]))
    @property
    def F(self): return self.c.fixed+self.host_s
    def item(self,r): return Item(r.left,self.sec([(r,r.left,r.history)])-self.c.fixed,r.started>=0)
    def add(self, r, now):
        self.waiting_tokens+=r.left; r.class_tokens=r.left
        if r.left<=self.thr: self.short.append(r)
        else:
            r.mark=self.sec([(r,r.left,r.history)]); self.longs.append(r)
    def behind(self,now): return max(((now-r.ready)/r.mark for r in self.longs),default=0.)
    def next(self, now):
        s=self.stack; busy=bool(s or self.longs)
        if self.short and (not busy or now>=self.g.opens_s(self.F,self.behind(now))): return self.shorts(now,busy)
        if not busy: self.guard.none_waits()
        if s:
            if self.longs and len(s)<self.depth and now>=self.lastmid+self.g.seconds(self.F,self.behind(now)): self.try_mid(now)
        elif self.longs: s.append(self.start(now))
        if not s: return None
        run=s[-1]; parts,ending,left,each,old=run
        if left>1: run[2]-=1; b=Batch([],[])
        else: s.pop(); b=Batch(parts,ending)
        b.launch=each+COST
        return b
    def shorts(self, now, busy):
        parts=[]; room=self.room
        while self.short and self.short[0].left<=room:
            r=self.short.popleft(); parts.append((r,r.left,r.history)); room-=r.left; self.waiting_tokens-=r.left
            r.started=now; r.history+=r.left; r.left=0
        self.busy=busy
        return Batch(parts,[p[0] for p in parts])
    def start(self, now):
        oldest=min(self.longs,key=lambda r:r.ready)
        line=sorted(self.longs,key=lambda r:self.item(r).seconds)
        if self.guard.due(): line.remove(oldest); line.insert(0,oldest)
        p=pack([self.item(r) for r in line],budget=self.room,fixed_s=self.F,waiting=len(self.longs)+len(self.short))
        parts=[];ending=[];room=self.room
        for i in p.picked:
            r=line[i]; n=min(r.left,room)
            if r.started<0: r.started=now
            parts.append((r,n,r.history)); room-=n; self.waiting_tokens-=n; r.left-=n; r.history+=n
            if not r.left: self.longs.remove(r); ending.append(r)
        return self.push(parts,ending,any(q[0] is oldest for q in parts))
    def push(self,parts,ending,old):
        took=self.sec(parts)+self.host_s
        self.guard.ran(took,oldest=old)
        n=max(1,min(SL,round(took/self.slice_s)))
        return [parts,ending,n,took/n,old]
    def try_mid(self, now):
        run=self.stack[-1]; left_s=run[2]*run[3]
        line=sorted((r for r in self.longs if r.started<0),key=lambda r:self.item(r).seconds)
        p=overtake([self.item(r) for r in line],budget=self.room,left_s=left_s,running=sum(len(b[0]) for b in self.stack),fixed_s=self.F,waiting=len(self.longs)+len(self.short))
        if not p.picked: return
        oldest=min(self.longs,key=lambda r:r.ready)
        self.lastmid=now; self.mids+=1; parts=[]
        for i in p.picked:
            r=line[i]; self.longs.remove(r); r.started=now; self.waiting_tokens-=r.left; parts.append((r,r.left,r.history)); r.history+=r.left; r.left=0
        self.stack.append(self.push(parts,[q[0] for q in parts],any(q[0] is oldest for q in parts)))
    def finished(self,batch,now):
        if not isinstance(batch.launch,float) and self.busy: self.g.ran(batch.begin,now)
class P:
    def __init__(self, chunk, model, *, overhead=.15, guard=.25, aim=8., widest=.25, slice_s=.004, mid=True, w_wait=1.0, oldest="since", depth=2, midgap=True, share=None, cap=.5, econ=True, hr=None, packw=1.0):
        self.econ=econ; self.hr=hr; self.packw=packw
        self.room=chunk; self.c=model.coefficients; self.thr=256; self.overhead=overhead; self.guard=guard; self.aim=aim; self.widest=widest; self.slice_s=slice_s
        self.mid=mid; self.w=w_wait; self.depth=depth; self.midgap=midgap; self.share=share; self.cap=cap
        self.short=deque(); self.longs=[]; self.stack=[]; self.credit=0.; self.last=-9.; self.lastmid=-9.; self.host_s=0.; self.waiting_tokens=0; self.short_s=0.
        self.preempts=0; self.mids=0
    def sec(self, parts): return self.c.seconds(sk.StepShape.of([(n,o) for _,n,o in parts]))
    def add(self, r, now):
        self.waiting_tokens+=r.left; r.class_tokens=r.left
        if r.left<=self.thr: self.short.append(r)
        else:
            r.mark=self.sec([(r,r.left,r.history)])  # lone
            self.longs.append(r)
    def gap(self, now):
        g=(self.c.fixed+self.host_s)/self.overhead
        if self.hr and self.longs and self.short:
            worst=max((now-r.ready)/r.mark for r in self.longs)
            need=self.hr_need(worst)
            if now-self.short[0].ready<need: return 1e9
            return g
        if self.aim and self.longs:
            worst=max((now-r.ready)/r.mark for r in self.longs)
            if worst>self.aim:
                if self.share: g=max(g, min(1.,(worst/self.aim-1))*self.short_s*self.share/(1-self.share))
                else: g=min(max(self.widest,g), g*worst/self.aim)
        return g
    def next(self, now):
        s=self.stack
        if self.short and (not (s or self.longs) or now-self.last>=self.gap(now)):
            return self.shorts(now)
        if s:
            if self.mid and self.longs and len(s)<=self.depth-1+0: self.try_mid(now)
        elif self.longs: s.append(self.start(now))
        if not s: return None
        run=s[-1]; parts,ending,left,each=run
        if left>1: run[2]-=1; b=Batch([],[])
        else: s.pop(); b=Batch(parts,ending)
        b.launch=each+COST
        return b
    def hr_need(self,worst): return (self.c.fixed+self.host_s)*worst/self.hr
    def shorts(self, now):
        parts=[]; room=self.room
        while self.short and self.short[0].left<=room:
            r=self.short.popleft(); parts.append((r,r.left,r.history)); room-=r.left; self.waiting_tokens-=r.left
            r.started=now; r.history+=r.left; r.left=0
        self.short_s=self.sec(parts); self.preempts+=bool(self.stack)
        return Batch(parts,[p[0] for p in parts])
    def order(self, now):
        self.longs.sort(key=lambda r: self.sec([(r,r.left,r.history)]))
        guarded=self.credit>0 and len(self.longs)>1
        if guarded:
            f=min(self.longs,key=lambda r:r.ready); 
            guarded = f is not self.longs[0]
            self.longs.remove(f); self.longs.insert(0,f)
        return guarded
    def pack(self, took, room, now):
        pass
    def start(self, now):
        oldest=min(self.longs,key=lambda r:r.ready)
        self.order(now)
        parts=[];ending=[];room=self.room
        while room>0 and self.longs:
            r=self.longs[0]
            n=min(r.left,room)
            if self.econ and parts:
                dt=self.sec([(r,n,r.history)])-self.c.fixed
                if len(parts)*dt>self.packw*(self.c.fixed+self.host_s)*(len(self.longs)+len(self.short)): break
            self.longs.pop(0)
            if r.started<0: r.started=now
            parts.append((r,n,r.history)); room-=n; self.waiting_tokens-=n
            r.left-=n; r.history+=n
            if r.left: self.longs.insert(0,r); break
            ending.append(r)
        took=self.sec(parts)
        has=any(p[0] is oldest for p in parts)
        if has: self.credit=max(-self.cap, self.credit-took*(1-self.guard))
        else: self.credit=min(self.cap, self.credit+took*self.guard)
        n=max(1,min(SL,round(took/self.slice_s)))
        return [parts,ending,n,(took+self.host_s)/n]
    def try_mid(self, now):
        run=self.stack[-1]; left_s=run[2]*run[3]
        if left_s<=3*self.c.fixed: return
        if self.midgap and now-self.lastmid<self.gap(now): return
        order=sorted(self.longs,key=lambda r:self.sec([(r,r.left,r.history)]))
        parts=[];room=self.room;best=None;bestgain=0.
        n_wait=len(self.longs)+len(self.short); r_run=len({id(p[0]) for b in self.stack for p in b[0]})
        F=self.c.fixed+self.host_s
        for i,r in enumerate(order):
            if r.started>=0 or r.left>room: break
            parts=[*parts,(r,r.left,r.history)]; room-=r.left
            took=self.sec(parts)+self.host_s
            if took>left_s: break
            m=len(parts)
            gain=m*left_s-(r_run*took+self.w*(n_wait-m)*F)
            if gain>bestgain: best,bestgain=parts,gain
        if not best: return
        self.lastmid=now; self.mids+=1
        for r,n,_ in best:
            self.longs.remove(r); r.started=now; self.waiting_tokens-=n; r.left=0; r.history+=n
        took=self.sec(best); n=max(1,min(SL,round(took/self.slice_s)))
        self.stack.append([best,[p[0] for p in best],n,(took+self.host_s)/n])
    def finished(self,batch,now):
        if not isinstance(batch.launch,float): self.last=now
sk.Preempt=(sk.Preempt,P)[0]
def run(make, workload, profile, chunk=8192):
    ev=Events(); s=make(chunk,profile); srv=Server("p",s,sk.SlicedDevice(profile),ev)
    if isinstance(s,(P,Q,sk.Preempt)):
        srv.device.host_s=s.host_s=srv._poll_s+srv._step_host_s; srv._poll_s=srv._step_host_s=0.
    from benchmark.sim.fleet import Single
    o=simulate(workload,Single([srv]),ev,chunk=chunk); o.s=s; return o
def line(name,o):
    g=o.groups(256,None,warm=.1); import numpy as np
    rec=o.record; new=np.array(rec.new); ttft=np.array(rec.ttft); 
    lone=sk.lone_s(o.profile,new,np.array(rec.cached),8192); slow=float(np.mean(ttft/lone))
    c=[f"{g[k].ttft[q]*1e3:8.1f}" for k in("short","long") for q in("p50","p90","p99")]
    return f"{name:34s}{o.rate:7.1f}/s {' '.join(c)} | mean {g['all'].ttft['mean']*1e3:7.1f} slow {slow:6.2f} p90 {g['all'].slowdown['p90']:5.1f} wait {g['long'].longest_wait:6.2f} mids {getattr(o.s,'mids','')}"
N=8000
prof=Profile.load("h200-qwen2.5-7b")
sizes=mix(lmsys(256),log_uniform(1024,8192),.05)
loads={"mix60":lambda:Open(sizes,.6*183,N,1),"burst":lambda:Open(sizes,.6*183,N,1,8.),"c4":lambda:Closed(sizes,4,3000,1),"c16":lambda:Closed(sizes,16,3000,1),"c128":lambda:Closed(sizes,128,6000,1),"mix70":lambda:Open(sizes,.7*183,N,1),"mix85":lambda:Open(sizes,.85*183,N,1),"c8":lambda:Closed(sizes,8,3000,1),"c64":lambda:Closed(sizes,64,4000,1),
"lmsys":lambda:Open(lmsys(),330,N,1),"azure85":lambda:sk.trace("azure_conv",.85,prof,4000),"moon60":lambda:sk.trace("mooncake_synthetic",.6,prof,3000)}
def policies():
    return {"fcfs":lambda c,p:sk.POLICIES["fcfs"](8192),"spf2048":lambda c,p:sk.POLICIES["shortest-prefill-first"](2048),
     "sketch aim8":lambda c,p:sk.Preempt(c,p.model(),guard=.25,aim=8.),
     "sketch mid":lambda c,p:sk.PreemptMid(c,p.model(),guard=.25,aim=8.),
     "Q":lambda c,p:Q(c,p.model()),"Q2048":lambda c,p:Q(2048,p.model()),"P0":lambda c,p:P(c,p.model(),econ=False),"P":lambda c,p:P(c,p.model()),"P w3":lambda c,p:P(c,p.model(),w_wait=3.),"P pw2":lambda c,p:P(c,p.model(),packw=2.),
     "P hr4":lambda c,p:P(c,p.model(),hr=4.),"P hr8":lambda c,p:P(c,p.model(),hr=8.),"P hr2":lambda c,p:P(c,p.model(),hr=2.)}
if __name__=="__main__":
    want=sys.argv[1].split(",") if len(sys.argv)>1 and sys.argv[1]!="all" else list(loads)
    pol=policies(); names=sys.argv[2].split(",") if len(sys.argv)>2 else list(pol)
    for l in want:
        print("--",l)
        for n in names: print(line(n,run(pol[n],loads[l](),prof)),flush=True)
