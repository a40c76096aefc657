"""Programs of kinds that the repository's traces are not of, and what PyTorch's allocator was asked for in
them, as logs for `vpmm replay`: a mixture of experts and a sequence-to-sequence model in training, a network
on samples of a graph, one that denoises pictures of varying sizes, replayed CUDA graphs beside prompts of any
length, and a server of three models on six streams. Nothing is learned: data and weights are random.

    PYTHONPATH=python/demos python3 programs.py KIND FILE.csv.gz [SECONDS]
"""

import random
import sys
import threading
import time

import record
import torch
from torch import nn
from torch.nn import functional

DEVICE = "cuda"
VOCABULARY = 32000
SHAPES = random.Random(7)


class Attention(nn.Module):
    """Its cache, if there is one, grows by being copied, as a list of tensors does."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x, cache=None):
        batch, length, width = x.shape
        parts = self.inputs(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
            cache[:] = [key, value]
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        return self.output(y.transpose(1, 2).reshape(batch, length, width))


class Dense(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Experts(nn.Module):
    """Each token goes to two of them: how many one of them gets is another number each time."""

    def __init__(self, width, count):
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(Dense(width) for _ in range(count))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).float().softmax(-1).topk(2)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            if rows.numel():
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, which, None])
        return out.view(x.shape)


class Block(nn.Module):
    def __init__(self, width, heads, feed_forward):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads), feed_forward

    def forward(self, x, cache=None):
        x = x + self.attention(self.before(x), cache)
        return x + self.feed_forward(self.between(x))


class Language(nn.Module):
    def __init__(self, layers, width, heads, feed_forward=None):
        super().__init__()
        make = feed_forward or (lambda: Dense(width))
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, make()) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, caches=None):
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, caches[number] if caches else None)
        return self.head(self.norm(x))


def words(*shape):
    return torch.randint(VOCABULARY, shape, device=DEVICE)


def loss_of(logits, tokens):
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def learn(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def until(seconds, most, step):
    end = time.time() + seconds
    for number in range(most):
        if time.time() > end:
            break
        step(number)
    torch.cuda.synchronize()


def moe(seconds):
    model = Language(8, 1024, 16, lambda: Experts(1024, 16)).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(_):
        batch, longest = SHAPES.choice([(8, 1024), (16, 512), (4, 2048)])
        tokens = words(batch, SHAPES.randint(longest // 4, longest) + 1)
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        learn(loss, optimizer)

    until(seconds, 20, step)


def seq2seq(seconds):
    encoder, decoder = (Language(6, 768, 12).to(DEVICE) for _ in range(2))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-4)

    def step(number):
        length = SHAPES.randint(16, 400)
        batch = max(1, SHAPES.choice([4096, 8192, 12288]) // length)
        source, target = words(batch, length), words(batch, SHAPES.randint(max(8, length // 2), length + 20))
        with torch.autocast("cuda", torch.bfloat16):
            hidden = encoder(source).mean(1, keepdim=True)
            loss = loss_of(decoder(target[:, :-1]) + hidden, target[:, 1:])
        learn(loss, optimizer)
        if number % 30 == 29:
            with torch.no_grad():
                for _ in range(3):
                    encoder(words(64, SHAPES.randint(16, 400)))

    until(seconds, 150, step)


def gnn(seconds):
    nodes, width, classes = 2_000_000, 256, 47
    features = torch.randn(nodes, width, device=DEVICE, dtype=torch.float16)
    layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3)).to(DEVICE)
    head = nn.Linear(width, classes).to(DEVICE)
    optimizer = torch.optim.Adam([*layers.parameters(), *head.parameters()], 1e-3)

    def sample():
        """Seeds, their neighbours, and theirs: edges from each to those before, and how many those are."""
        hops, now = [], 1024
        for fanout in (SHAPES.randint(5, 10), SHAPES.randint(5, 10), SHAPES.randint(10, 15)):
            further = min(nodes, int(now * fanout * SHAPES.uniform(0.6, 0.95)) + now)
            ends = [torch.randint(most, (now * fanout,), device=DEVICE) for most in (further, now)]
            hops.append((ends, now))
            now = further
        return hops[::-1], torch.randint(nodes, (now,), device=DEVICE)

    def step(number):
        hops, inputs = sample()
        x, labels = features[inputs].float(), torch.randint(classes, (1024,), device=DEVICE)
        for layer, ((source, target), count) in zip(layers, hops, strict=True):
            sums = torch.zeros(count, width, device=DEVICE).index_add(0, target, x[source])
            degrees = torch.bincount(target, minlength=count).clamp(min=1).unsqueeze(1)
            x = functional.relu(layer(torch.cat([x[:count], sums / degrees], 1)))
            x = functional.dropout(x, 0.3)
        loss = functional.cross_entropy(head(x), labels)
        learn(loss, optimizer)
        if number % 20 == 0:
            loss.item()

    until(seconds, 300, step)


def normed(inputs, outputs):
    return nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, 1, 1))


class Residual(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = normed(inputs, outputs), normed(outputs, outputs)
        self.beside = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        return self.beside(x) + self.second(self.first(x))


class Denoiser(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.input, self.output = nn.Conv2d(4, width, 3, 1, 1), nn.Conv2d(width, 4, 3, 1, 1)
        self.down = nn.ModuleList(Residual(width * a, width * b) for a, b in [(1, 1), (1, 2), (2, 4)])
        self.middle = Residual(4 * width, 4 * width)
        self.up = nn.ModuleList(Residual(width * a, width * b) for a, b in [(8, 2), (4, 1), (2, 1)])

    def forward(self, x):
        x, kept = self.input(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            y = kept.pop()
            x = block(torch.cat([functional.interpolate(x, size=y.shape[-2:]), y], 1))
        return self.output(x)


def unet(seconds):
    model = Denoiser().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(number):
        height, width = SHAPES.choice([(64, 64), (48, 80), (80, 48), (96, 64), (64, 96), (72, 72)])
        x = torch.randn(SHAPES.randint(4, 24), 4, height, width, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.mse_loss(model(x).float(), x)
        learn(loss, optimizer)
        if number % 25 == 24:
            with torch.no_grad():
                x = torch.randn(SHAPES.randint(1, 8), 4, 96, 96, device=DEVICE)
                for _ in range(20):
                    x = x - 0.05 * model(x)
            x.cpu()

    until(seconds, 200, step)


@torch.no_grad()
def cudagraphs(seconds):
    model = Language(12, 1024, 16).to(DEVICE, torch.bfloat16).eval()
    pool, graphs = torch.cuda.graph_pool_handle(), {}
    for batch in [64, 48, 32, 24, 16, 8, 4, 2, 1]:
        tokens = torch.zeros(batch, 64, dtype=torch.long, device=DEVICE)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(tokens)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = model(tokens)
        graphs[batch] = (graph, tokens, logits)

    def step(_):
        count = SHAPES.randint(1, 64)
        batch = min(size for size in graphs if size >= count)
        graph, tokens, logits = graphs[batch]
        tokens.copy_(words(batch, 64))
        graph.replay()
        logits[:count].float().softmax(-1).topk(40).values.sum(-1).cpu()
        prompt = model(words(SHAPES.randint(1, 8), SHAPES.randint(16, 700)))
        prompt[:, -1].argmax(-1).cpu()

    until(seconds, 600, step)


def server(seconds):
    talks = Language(12, 1024, 16).to(DEVICE, torch.bfloat16).eval()
    embeds = Language(6, 512, 8).to(DEVICE, torch.float16).eval()
    widths = [3, 64, 128, 192, 256, 320]
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, 2 if at else 1, 1), nn.BatchNorm2d(b), nn.ReLU())
        for at, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
    ]
    sees = nn.Sequential(*layers).to(DEVICE).eval()
    end = time.time() + seconds

    def serve(number):
        own = random.Random(number)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            while time.time() < end:
                kind = own.random()
                if kind < 0.4:
                    caches = [[] for _ in talks.blocks]
                    tokens = words(own.randint(1, 8), own.randint(16, 900))
                    for _ in range(own.randint(4, 40)):
                        tokens = talks(tokens, caches)[:, -1:].argmax(-1)
                    tokens.cpu()
                elif kind < 0.7:
                    shape = own.randint(1, 16), 3, own.randint(8, 30) * 16, own.randint(8, 30) * 16
                    sees(torch.randn(*shape, device=DEVICE)).mean().cpu()
                else:
                    embeds(words(own.randint(1, 64), own.randint(8, 256)))[:, 0].float().cpu()
                time.sleep(own.random() * 0.01)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


KINDS = {kind.__name__: kind for kind in (moe, seq2seq, gnn, unet, cudagraphs, server)}

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in KINDS:
        sys.exit(f"{__doc__}\nKinds: {', '.join(KINDS)}")
    torch.manual_seed(0)
    record.begin(torch)
    KINDS[sys.argv[1]](float(sys.argv[3]) if len(sys.argv) > 3 else 14)
    cuda = torch.cuda
    print(f"peak {cuda.max_memory_allocated() / 1e9:.2f} GB, reserved {cuda.max_memory_reserved() / 1e9:.2f}")
    record.end(torch, sys.argv[2])
