# The same by the processor that the thread runs on, the time between calls, and whether the GPU is at work.
import threading, resource, os, sys
exec(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), '../h200-2026-11-25-functions/access.py')).read().split('for rep in range(2)')[0])
def cur(): ck(cu.cuCtxSetCurrent(ctx),'current')
def quick(name,rounds=12,size=2<<20,n=64,gap=0):
    hs=[create(size) for _ in range(n)]; r=[];c=[];m=[];u=[]
    for k in range(rounds):
        t=time.perf_counter_ns()
        for i,h in enumerate(hs): mp(base+i*size,size,h)
        m.append((time.perf_counter_ns()-t)/1e3/n)
        r.append(timed(access,base,n*size)/n); u.append(timed(unmap,base,n*size)/n)
        if gap: time.sleep(gap)
    for h in hs: ck(cu.cuMemRelease(u64(h)),'release')
    print(f'{name:40s} access: '+' '.join('%.1f'%x for x in r[:12])+' | map %.2f unmap %.2f'%(S.median(m),S.median(u)),os.sched_getcpu() if hasattr(os,'sched_getcpu') else '',flush=True)
quick('main, first')
quick('main, again')
quick('main, 20 ms between',gap=0.02)
quick('main, 200 ms between',8,gap=0.2)
quick('main, again')
def th(name,**k):
    t=threading.Thread(target=lambda:(cur(),quick(name,**k))); t.start(); t.join()
th('thread'); th('thread again')
quick('main, again')
# pinned to one cpu
os.sched_setaffinity(0,{3}); quick('pinned 3'); quick('pinned 3 again'); os.sched_setaffinity(0,set(range(os.cpu_count())))
# GPU busy
p=u64(); ck(cu.cuMemAlloc_v2(C.byref(p),C.c_size_t(1<<30)),'alloc')
st=C.c_void_p(); ck(cu.cuStreamCreate(C.byref(st),1),'stream')
def busy(k):
    for _ in range(k): ck(cu.cuMemsetD32Async(p,C.c_uint(7),C.c_size_t(1<<28),st),'memset')
busy(4000); quick('GPU busy'); quick('GPU busy again'); print('still busy',cu.cuStreamQuery(st)!=0)
ck(cu.cuStreamSynchronize(st),'sync'); quick('idle again')
# spinning host thread beside
