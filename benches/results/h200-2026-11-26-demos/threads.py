# What cuMemSetAccess costs a mapping: from several threads at once, beside cuMemCreate and cuMemUnmap, by kinds of handle.
import threading, resource, os
exec(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), '../h200-2026-11-25-functions/access.py')).read().split('for rep in range(2)')[0])
def cur(): ck(cu.cuCtxSetCurrent(ctx),'current')
def rus():
    r=resource.getrusage(resource.RUSAGE_SELF); return r.ru_utime*1e6,r.ru_stime*1e6
for size in (2<<20,32<<20):
  for nt in (1,2,4):
    n=64
    hs=[create(size) for _ in range(n)]
    per=n//nt
    res=[]
    for k in range(14):
        va=base
        for i,h in enumerate(hs): mp(va+i*size,size,h)
        bar=threading.Barrier(nt+1)
        def work(j):
            cur(); bar.wait(); access(va+j*per*size,per*size); bar.wait()
        ts=[threading.Thread(target=work,args=(j,)) for j in range(nt)]
        [t.start() for t in ts]
        u0=rus(); bar.wait(); t=time.perf_counter_ns(); bar.wait(); e=(time.perf_counter_ns()-t)/1e3; u1=rus()
        [t.join() for t in ts]
        res.append((e/n,(u1[0]-u0[0])/n,(u1[1]-u0[1])/n))
        unmap(va,n*size)
    res.sort(); print('access',size>>20,'MiB threads',nt,'us each %.2f user %.2f sys %.2f'%res[len(res)//2],flush=True)
    # creates in one thread, access in another
    for h in hs: ck(cu.cuMemRelease(u64(h)),'rel')
# create while access
size=2<<20;n=64
for both in (0,1):
    res=[]
    for k in range(10):
        hs=[create(size) for _ in range(n)]
        for i,h in enumerate(hs): mp(base+i*size,size,h)
        made=[]
        bar=threading.Barrier(2 if both else 1)
        def mk():
            cur(); bar.wait()
            for _ in range(n): made.append(create(size))
        t0=None
        if both: th=threading.Thread(target=mk); th.start(); bar.wait()
        t=time.perf_counter_ns(); access(base,n*size); e=(time.perf_counter_ns()-t)/1e3
        if both: th.join(); e2=(time.perf_counter_ns()-t)/1e3
        else:
            t=time.perf_counter_ns(); bar.wait(); made=[create(size) for _ in range(n)]; e2=(time.perf_counter_ns()-t)/1e3
        res.append((e/n,e2/n)); unmap(base,n*size)
        for h in hs+made: ck(cu.cuMemRelease(u64(h)),'rel')
    res.sort(); print('create beside access' if both else 'apart','access %.2f create %.2f'%res[len(res)//2],flush=True)
# unmap beside access
for nt in (1,2):
    res=[]
    for k in range(10):
        hs=[create(size) for _ in range(2*n)]
        for i,h in enumerate(hs): mp(base+i*size,size,h)
        access(base,n*size)
        def un(): cur(); unmap(base,n*size)
        t=time.perf_counter_ns()
        if nt==2:
            th=threading.Thread(target=un); th.start(); access(base+n*size,n*size); th.join()
        else: un(); access(base+n*size,n*size)
        res.append((time.perf_counter_ns()-t)/1e3/n); unmap(base+n*size,n*size)
        for h in hs: ck(cu.cuMemRelease(u64(h)),'rel')
    res.sort(); print('unmap and access',nt,'%.2f'%res[5],flush=True)
# kinds of properties
for name,ht,flags in (('plain',0,b''),('fd',1,b''),('compress',0,b'\x01'),('rdma',0,b'\x00\x01')):
    prop.h=ht
    for i in range(8): prop.flags[i]=flags[i] if i<len(flags) else 0
    try: trial(name,2<<20,64,lambda k:base)
    except SystemExit as x: print(name,x)
prop.h=0
for i in range(8): prop.flags[i]=0
acc.flags=1; trial('read only',2<<20,64,lambda k:base); acc.flags=3
# access twice: first reading then writing
