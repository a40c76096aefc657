"""Trains a GPT on random text, with batches and lengths that vary from step to step."""

import random

from workload import arguments, choose, run

args = arguments(
    __doc__,
    layers=(int, 12),
    width=(int, 1024),
    heads=(int, 16),
    vocabulary=(int, 32000),
    longest=(int, 1024),
    batch=(int, 24),
)
torch = choose(args)

from torch.nn import functional
from transformer import Transformer

model = Transformer(args.layers, args.width, args.heads, args.vocabulary, args.longest).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
shapes = random.Random(args.seed)
sampler = torch.Generator().manual_seed(args.seed)


def step(number):
    batch = shapes.randint(max(1, args.batch // 3), args.batch)
    length = shapes.randint(args.longest // 8, args.longest)
    text = torch.randint(args.vocabulary, (batch, length + 1), generator=sampler).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(text[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


run(args, torch, step, shapes, sampler)
