# What cuMemSetAccess costs a mapping: by where it is, how many there are in one call, and what else is mapped.
import ctypes as C, time, statistics as S, sys
cu=C.CDLL('libcuda.so.1'); G=2<<20
def ck(r,w):
    if r: raise SystemExit(f'{w}: {r}')
ck(cu.cuInit(0),'init'); ctx=C.c_void_p(); dev=C.c_int(0)
ck(cu.cuDevicePrimaryCtxRetain(C.byref(ctx),dev),'retain'); ck(cu.cuCtxSetCurrent(ctx),'current')
class Loc(C.Structure): _fields_=[('type',C.c_int),('id',C.c_int)]
class Prop(C.Structure): _fields_=[('type',C.c_int),('h',C.c_int),('loc',Loc),('win',C.c_void_p),('flags',C.c_ubyte*8)]
class Acc(C.Structure): _fields_=[('loc',Loc),('flags',C.c_int)]
prop=Prop(1,0,Loc(1,0),None); acc=Acc(Loc(1,0),3)
u64=C.c_uint64
def reserve(n,al=0):
    p=u64(); ck(cu.cuMemAddressReserve(C.byref(p),C.c_size_t(n),C.c_size_t(al),u64(0),u64(0)),'reserve'); return p.value
def create(n):
    h=u64(); ck(cu.cuMemCreate(C.byref(h),C.c_size_t(n),C.byref(prop),u64(0)),'create'); return h.value
def mp(va,n,h): ck(cu.cuMemMap(u64(va),C.c_size_t(n),C.c_size_t(0),u64(h),u64(0)),'map')
def access(va,n): ck(cu.cuMemSetAccess(u64(va),C.c_size_t(n),C.byref(acc),C.c_size_t(1)),'access')
def unmap(va,n): ck(cu.cuMemUnmap(u64(va),C.c_size_t(n)),'unmap')
def timed(f,*a):
    t=time.perf_counter_ns(); f(*a); return (time.perf_counter_ns()-t)/1e3
base=reserve(1<<40)
def trial(name,size,count,where,rounds=12,keep=False,each=False):
    hs=[create(size) for _ in range(count)]; r=[]; un=[]
    old=None
    for k in range(rounds):
        va=where(k)
        for i,h in enumerate(hs): mp(va+i*size,size,h)
        if each: t=sum(timed(access,va+i*size,size) for i in range(count))
        else: t=timed(access,va,count*size)
        r.append(t/count)
        if keep:
            if old is not None: un.append(timed(unmap,old,count*size)/count)
            old=va
        else: un.append(timed(unmap,va,count*size)/count)
    if keep: unmap(old,count*size)
    for h in hs: ck(cu.cuMemRelease(u64(h)),'release')
    print(f'{name:58s} size {size>>20:4d} MiB x{count:4d}: access first {r[0]:6.2f} median of later {S.median(r[1:]):6.2f} least {min(r):6.2f}; unmap {S.median(un):6.2f} us each',flush=True)
GB=1<<30
for rep in range(2):
  for size in (2<<20,8<<20,32<<20):
    for n in (1,8,64): trial('same addresses again and again',size,n,lambda k:base)
    trial('fresh addresses each time',size,64,lambda k:base+(k+1+20*rep)*8*GB)
    trial('two places in turns, unmapped at once',size,64,lambda k:base+(k%2)*8*GB)
    trial('two places in turns, the other still mapped',size,64,lambda k:base+(k%2)*8*GB,keep=True)
    trial('one call for each',size,64,lambda k:base,each=True)
# beside many mappings
many=[create(G) for _ in range(3000)]; far=base+500*GB
for i,h in enumerate(many): mp(far+i*G,G,h)
access(far,3000*G)
trial('beside 3000 mappings, same addresses',G,64,lambda k:base)
trial('behind 3000 mappings, in a row with them',G,64,lambda k:far+3000*G)
