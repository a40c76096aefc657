"""Generates text with caches of keys and values that grow by a token at a time; requests vary in number,
length of prompt and length of answer. What counts as the loss is the mean of the last logits."""

import random

from workload import arguments, choose, run

args = arguments(
    __doc__,
    steps=12,
    warmup=3,
    layers=(int, 24),
    width=(int, 2048),
    heads=(int, 16),
    vocabulary=(int, 32000),
    longest=(int, 2048),
    batch=(int, 32),
    answer=(int, 128),
)
torch = choose(args)

from transformer import Transformer

with torch.device("cuda"):
    model = Transformer(args.layers, args.width, args.heads, args.vocabulary, args.longest)
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
shapes = random.Random(args.seed)
sampler = torch.Generator().manual_seed(args.seed)


@torch.no_grad()
def step(number):
    batch = shapes.randint(1, args.batch)
    answer = shapes.randint(args.answer // 8, args.answer)
    prompt = shapes.randint(16, args.longest - answer)
    text = torch.randint(args.vocabulary, (batch, prompt), generator=sampler).cuda()
    caches = [[] for _ in range(args.layers)]
    logits = model(text, caches)[:, -1:]
    for _ in range(answer):
        logits = model(logits.argmax(-1), caches)
    return logits.float().mean()


run(args, torch, step, shapes, sampler)
