"""What PyTorch and CuPy do with memory of another GPU: with their own allocators, on pools, and on pools open to each other."""

import sys, subprocess, textwrap

HEAD = {
    "plain": "",
    "vpmm": "import vpmm.torch; vpmm.torch.use()\n",
    "vpmm+access": "import vpmm, vpmm.torch; vpmm.torch.use()\nfrom vpmm._library import lib\nfor i in (0,1):\n    r = lib.vpmm_pool_set_access(vpmm.Pool.of_process(i)._handle, 1 - i, 3); assert r is None or not r or r == 0, r\n",
}
T = {
    "to": "a=torch.arange(1<<22,device='cuda:0'); b=a.to('cuda:1'); assert b.sum().item()==a.sum().item()",
    "to_small": "a=torch.arange(100,device='cuda:0'); b=a.to('cuda:1'); assert b.sum().item()==4950",
    "transposed": "a=torch.randn(1000,700,device='cuda:0'); b=a.t().to('cuda:1'); assert torch.equal(b.cpu(),a.t().cpu())",
    "copy_": "a=torch.randn(1000,700,device='cuda:0'); b=torch.empty(700,1000,device='cuda:1'); b.copy_(a.t()); assert torch.equal(b.cpu(),a.t().cpu())",
    "dtype": "a=torch.randn(1000,device='cuda:0'); b=a.to('cuda:1',torch.float16); assert torch.equal(b.cpu(),a.cpu().half())",
    "scatter": "a=torch.randn(64,32,device='cuda:0'); p=torch.nn.parallel.comm.scatter(a,[0,1]); g=torch.nn.parallel.comm.gather(p,destination=0); assert torch.equal(a,g)",
    "dp": "m=torch.nn.DataParallel(torch.nn.Linear(32,8).to('cuda:0'),[0,1]); x=torch.randn(64,32,device='cuda:0'); m(x).sum().backward(); torch.cuda.synchronize(0); torch.cuda.synchronize(1)",
    "peer?": "print(torch.cuda.can_device_access_peer(0,1))",
    "graph": "a=torch.randn(1000,device='cuda:0'); s=torch.cuda.Stream(1)\nwith torch.cuda.stream(s):\n    b=a.to('cuda:1',non_blocking=True)\ns.synchronize(); assert torch.equal(b.cpu(),a.cpu())",
}
C = {
    "c_read": "a=cupy.arange(1000)\nwith cupy.cuda.Device(1):\n    b=cupy.arange(1000)+a; assert int(b.sum())==999000",
    "c_copy": "a=cupy.arange(1000)\nwith cupy.cuda.Device(1):\n    b=cupy.asarray(a); assert int(b.sum())==499500",
}
CHEAD = {
    "plain": "",
    "vpmm": "import vpmm.cupy; cupy.cuda.set_allocator(vpmm.cupy.allocator)\n",
    "vpmm+access": "import vpmm.cupy; cupy.cuda.set_allocator(vpmm.cupy.allocator)\nfrom vpmm._library import lib\nfor i in (0,1):\n    lib.vpmm_pool_set_access(vpmm.Pool.of_process(i)._handle, 1 - i, 3)\n",
}
jobs = []
for lib, heads, tests in (("torch", HEAD, T), ("cupy", CHEAD, C)):
    for h in heads:
        code = f"import {lib}\n" + heads[h] + "import traceback\n"
        for n, t in tests.items():
            code += f"try:\n{textwrap.indent(t,'    ')}\n    print('{n} ok')\nexcept BaseException as e: print('{n}', type(e).__name__, str(e).strip().splitlines()[0][:110])\n"
        jobs.append(
            (
                lib,
                h,
                subprocess.Popen(
                    [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                ),
            )
        )
for lib, h, j in jobs:
    try:
        out = j.communicate(timeout=50)[0]
    except subprocess.TimeoutExpired:
        j.kill()
        out = "TIMEOUT " + str(j.communicate()[0])
    print(f"== {lib} {h} rc {j.returncode}\n{out[-900:]}", flush=True)
