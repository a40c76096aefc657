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
nn, functional = torch.nn, torch.nn.functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(args.width) for _ in range(2))
        self.qkv = nn.Linear(args.width, 3 * args.width)
        self.out = nn.Linear(args.width, args.width)
        self.up = nn.Linear(args.width, 4 * args.width)
        self.down = nn.Linear(4 * args.width, args.width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, args.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Embedding(args.longest, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, text):
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
shapes = random.Random(args.seed)
sampler = torch.Generator().manual_seed(args.seed)


def step(number):
    batch = shapes.randint(args.batch // 3, args.batch)
    length = shapes.randint(args.longest // 8, args.longest)
    text = torch.randint(args.vocabulary, (batch, length + 1), generator=sampler)
    # From pageable memory, as it varies in size; it waits for the copy.
    text = text.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(text[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


run(args, torch, step)
