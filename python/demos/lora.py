"""Fine-tunes a frozen transformer by low-rank additions, with activations recomputed in the backward pass
(checkpointing), and batches and lengths that vary."""

import random

from workload import arguments, choose, run

args = arguments(
    __doc__,
    steps=40,
    warmup=8,
    layers=(int, 24),
    width=(int, 2048),
    heads=(int, 16),
    vocabulary=(int, 32000),
    longest=(int, 2048),
    batch=(int, 16),
    rank=(int, 16),
)
torch = choose(args)

from torch.nn import functional
from transformer import Transformer

with torch.device("cuda"):
    model = Transformer(
        args.layers, args.width, args.heads, args.vocabulary, args.longest, checkpointed=True
    ).to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.add_low_rank(args.rank), lr=1e-4)
shapes = random.Random(args.seed)
sampler = torch.Generator().manual_seed(args.seed)


def step(number):
    batch = shapes.randint(max(1, args.batch // 4), args.batch)
    length = shapes.randint(args.longest // 16, args.longest)
    text = torch.randint(args.vocabulary, (batch, length + 1), generator=sampler).cuda()
    logits = model(text[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


run(args, torch, step, shapes, sampler)
