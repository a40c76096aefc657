"""A training on two GPUs, a process each, with NCCL between them. Skipped with fewer."""

import os
import pathlib
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

if torch.cuda.device_count() < 2:
    pytest.skip(f"two GPUs are needed: {torch.cuda.device_count()}", allow_module_level=True)

WORLD = 2
SECONDS = 120


@pytest.mark.parametrize("what", ["collectives", "data_parallel", "sharded", "in_a_graph", "beside_movement"])
def test_on_two_gpus(tmp_path, what):
    environment = dict(os.environ, NCCL_SOCKET_IFNAME="lo")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, what, str(tmp_path / "store"), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        told = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(told)


def collectives(rank):
    for count in (1, 1000, 1 << 20, 64 << 20):
        given = torch.full((count,), rank + 1.0, device="cuda")
        dist.all_reduce(given)
        assert (given == 3).all()
    mine = torch.full((1 << 20,), float(rank), device="cuda")
    of_all = torch.empty(WORLD << 20, device="cuda")
    dist.all_gather_into_tensor(of_all, mine)
    assert of_all.tolist()[:: 1 << 20] == [0, 1]
    part = torch.empty_like(mine)
    dist.reduce_scatter_tensor(part, of_all)
    assert (part == 2 * rank).all()
    dist.all_to_all_single(part, torch.full_like(mine, float(rank)))
    assert part.tolist()[:: 1 << 19] == [0, 1]
    here_and_there = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, part, 1 - rank)]
    for work in dist.batch_isend_irecv(here_and_there):
        work.wait()
    assert (part == 1 - rank).all()


def data_parallel(rank):
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    train(parallel, width=1024)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    of_all = torch.empty(WORLD * len(weights), device="cuda")
    dist.all_gather_into_tensor(of_all, weights)
    assert torch.equal(of_all[: len(weights)], of_all[len(weights) :])


def sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)]).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train(model, width=2048)


def train(model, width):
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(12):
        loss = model(torch.randn(64 + 32 * step, width, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def in_a_graph(rank):
    given = torch.ones(4 << 20, device="cuda")
    dist.all_reduce(given.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = given * 2
        dist.all_reduce(doubled)
        told = doubled + 1
    for scale in (1, 3):
        given.fill_(scale)
        graph.replay()
        assert (told == 4 * scale + 1).all()


def beside_movement(rank):
    """Blocks of many sizes come and go, so that memory moves below what NCCL has seen before."""
    sizes, live = random.Random(1), []
    for step in range(400):
        live.append(torch.full((sizes.randint(1, 8 << 20),), rank + 1.0, device="cuda"))
        if step % 5 == 0:
            dist.all_reduce(live[-1])
            assert (live[-1] == 3).all()
            live[-1].fill_(rank + 1.0)
        if len(live) > 20:
            gone = live.pop(sizes.randrange(len(live)))
            assert (gone == rank + 1).all()


if __name__ == "__main__":
    import vpmm.torch

    vpmm.torch.use()
    import torch.distributed as dist

    what, store, rank = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=store.as_uri(), rank=rank, world_size=WORLD, device_id=device)
    globals()[what](rank)
    torch.cuda.synchronize()
    pool = vpmm.Pool.of_process(rank)
    pool.validate()
    assert pool.statistics().mapped_bytes > 0
    dist.barrier()
    dist.destroy_process_group()
