"""Programs of still other kinds, none of which the pool had seen when it was tuned, and what PyTorch's allocator
was asked for in them, as logs for `vpmm replay`: learning from a model's own answers, pictures with activations
computed twice, a model whose weights are gathered layer by layer on another stream, objects found in pictures,
pictures made from text, a server with all its cache in one block, sentences that grow longer and longer, and a
training that is evaluated and saved in between. Nothing is learned: data and weights are random.

    PYTHONPATH=python/demos:benches/results/simulated-2026-11-25-programs python3 further.py KIND FILE.csv.gz [SECONDS]
"""

import copy
import sys

import record
import torch
from programs import DEVICE, SHAPES, VOCABULARY, Dense, Denoiser, Language, learn, loss_of, until, words
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def answers(seconds):
    """Rollouts whose caches grow word by word, scores of two models, then some steps of training on them."""
    model = Language(12, 1024, 16).to(DEVICE, torch.bfloat16)
    judge = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

    def logprobs(network, tokens):
        logits = network(tokens[:, :-1]).float().log_softmax(-1)
        return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def step(_):
        tokens = words(32, SHAPES.randint(32, 200))
        with torch.no_grad():
            caches = [[] for _ in model.blocks]
            now = tokens
            for _ in range(SHAPES.randint(16, 160)):
                logits = model(now, caches)[:, -1].float()
                now = torch.multinomial((logits / 0.8).softmax(-1), 1)
                tokens = torch.cat([tokens, now], 1)
            del caches
            before = torch.cat([logprobs(model, part) for part in tokens.split(8)])
            beside = torch.cat([logprobs(judge, part) for part in tokens.split(8)])
        gains = torch.randn(32, 1, device=DEVICE) - 0.1 * (before - beside)
        for _ in range(2):
            for rows in torch.randperm(32, device=DEVICE).split(8):
                ratio = (logprobs(model, tokens[rows]) - before[rows]).exp()
                loss = -torch.min(ratio * gains[rows], ratio.clamp(0.8, 1.2) * gains[rows]).mean()
                (loss / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    until(seconds, 40, step)


class Looks(nn.Module):
    def __init__(self, layers, width, heads, patch=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        make = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList(
            make(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x, twice=True):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if twice else block(x)
        return self.head(x.mean(1))


def twice(seconds):
    """A vision transformer with activations that are computed again, and a mean of its weights beside it."""
    model = Looks(24, 1024, 16).to(DEVICE)
    mean = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
    scaler = torch.amp.GradScaler()

    def step(number):
        side = SHAPES.choice([160, 192, 224, 256])
        pictures = torch.randn(96, 3, side, side, device=DEVICE)
        labels = torch.rand(96, 1000, device=DEVICE).softmax(-1)
        share = SHAPES.random()
        pictures = share * pictures + (1 - share) * pictures.flip(0)
        labels = share * labels + (1 - share) * labels.flip(0)
        with torch.autocast("cuda", torch.float16):
            loss = functional.cross_entropy(model(pictures), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 0.01)
            if number % 10 == 9:
                mean(torch.randn(256, 3, 224, 224, device=DEVICE), twice=False).argmax(-1).cpu()

    until(seconds, 60, step)


def gathered(seconds):
    """What sharded training does on each device: weights of the next layer come together on a second stream
    while this one works, and go when it is done; gradients leave on a third."""
    layers, width, ranks = 16, 2048, 8
    gathers, reduces = torch.cuda.Stream(), torch.cuda.Stream()
    main = torch.cuda.current_stream()
    block = nn.TransformerEncoderLayer(width, 16, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    block = block.to(DEVICE, torch.bfloat16)
    names = [name for name, _ in block.named_parameters()]
    shapes = [parameter.shape for parameter in block.parameters()]
    whole = sum(shape.numel() for shape in shapes)
    part = -(-whole // ranks)
    shards = [torch.randn(part, device=DEVICE) * 0.01 for _ in range(layers)]
    moments = [(torch.zeros_like(shard), torch.zeros_like(shard)) for shard in shards]

    def gather(number):
        gathers.wait_stream(main)
        with torch.cuda.stream(gathers):
            flat = torch.empty(part * ranks, device=DEVICE, dtype=torch.bfloat16)
            own = shards[number].to(torch.bfloat16)
            for rank in range(ranks):
                flat[rank * part : (rank + 1) * part].copy_(own)
        flat.record_stream(main)
        return flat

    def apply(flat, x):
        parts = flat[:whole].split([shape.numel() for shape in shapes])
        weights = {name: p.view(shape) for name, p, shape in zip(names, parts, shapes, strict=True)}
        return torch.func.functional_call(block, weights, (x,))

    def step(_):
        x = torch.randn(SHAPES.choice([4, 6, 8]), 1024, width, device=DEVICE, dtype=torch.bfloat16)
        inputs, following = [], gather(0)
        with torch.no_grad():
            for number in range(layers):
                main.wait_stream(gathers)
                flat, following = following, gather(number + 1) if number + 1 < layers else None
                inputs.append(x)
                x = apply(flat, x)
        gradient = torch.randn_like(x)
        following = gather(layers - 1)
        for number in reversed(range(layers)):
            main.wait_stream(gathers)
            flat, following = following, gather(number - 1) if number else None
            flat = flat.detach().requires_grad_()
            x = inputs.pop().detach().requires_grad_()
            apply(flat, x).backward(gradient)
            gradient, whole_gradient = x.grad, flat.grad
            reduces.wait_stream(main)
            with torch.cuda.stream(reduces):
                reduced = whole_gradient.view(ranks, part).float().mean(0)
                first, second = moments[number]
                first.lerp_(reduced, 0.1)
                second.lerp_(reduced.square(), 0.05)
                shards[number].addcdiv_(first, second.sqrt() + 1e-8, value=-1e-4)
            whole_gradient.record_stream(reduces)
        main.wait_stream(reduces)

    until(seconds, 60, step)


def detects(seconds):
    """Pictures of any size, boxes of any number: pyramids, crops around proposals, masks for those that stay."""

    def down(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU(),
        )

    widths = [3, 64, 128, 256, 512]
    backbone = nn.ModuleList(down(a, b) for a, b in zip(widths, widths[1:], strict=False)).to(DEVICE)
    across = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in widths[2:]).to(DEVICE)
    scores = nn.Conv2d(256, 3, 3, 1, 1).to(DEVICE)
    boxes = nn.Sequential(nn.Flatten(), nn.Linear(256 * 49, 1024), nn.ReLU(), nn.Linear(1024, 91)).to(DEVICE)
    masks = nn.Sequential(*[nn.Conv2d(256, 256, 3, 1, 1) for _ in range(4)], nn.Conv2d(256, 91, 1)).to(DEVICE)
    all_of_it = nn.ModuleList([backbone, across, scores, boxes, masks])
    optimizer = torch.optim.SGD(all_of_it.parameters(), 1e-3, momentum=0.9)

    def crops(level, count, side):
        corners = torch.rand(count, 1, 1, 2, device=DEVICE) * 1.6 - 0.8
        grid = torch.linspace(-0.2, 0.2, side, device=DEVICE)
        grid = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1) + corners
        pictures = torch.randint(level.shape[0], (count,), device=DEVICE)
        return functional.grid_sample(level[pictures], grid, align_corners=False)

    def step(number):
        learns = number % 12 != 11
        with torch.set_grad_enabled(learns), torch.autocast("cuda", torch.bfloat16):
            count = SHAPES.choice([2, 4, 4, 6])
            height, width = (32 * SHAPES.randint(15, 26) for _ in range(2))
            x, levels = torch.randn(count, 3, height, width, device=DEVICE), []
            for stage in backbone:
                x = stage(x)
                levels.append(x)
            levels = [beside(level) for beside, level in zip(across, levels[1:], strict=True)]
            for upper in (1, 0):
                levels[upper] = levels[upper] + functional.interpolate(levels[upper + 1], size=levels[upper].shape[-2:])
            loss = sum(scores(level).float().sigmoid().mean() for level in levels)
            level = levels[SHAPES.randint(1, 2)]
            loss = loss + functional.cross_entropy(
                boxes(crops(level, chosen := SHAPES.randint(20, 512), 7)).float(),
                torch.randint(91, (chosen,), device=DEVICE),
            )
            kept = SHAPES.randint(1, 60)
            loss = loss + masks(crops(level, kept, 28)).float().sigmoid().mean()
        if learns:
            learn(loss, optimizer)
        else:
            (loss.item(), masks(crops(level.float().detach(), 100, 28)).detach().cpu())

    until(seconds, 200, step)


@torch.no_grad()
def pictures(seconds):
    """Text into pictures: an encoder, some thirty steps of two batches at once, and a decoder that needs much at the end."""
    text = Language(12, 768, 12).to(DEVICE, torch.float16).eval()
    model = Denoiser(256).to(DEVICE, torch.float16).eval()
    widths = [256, 256, 128, 128]
    decoder = nn.Sequential(nn.Conv2d(4, 256, 3, 1, 1), *[
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, 1, 1), nn.GroupNorm(32, b), nn.SiLU())
        for a, b in zip(widths, widths[1:], strict=False)
    ], nn.Conv2d(128, 3, 3, 1, 1)).to(DEVICE, torch.float16).eval()

    def step(number):
        count = SHAPES.choice([1, 1, 2, 4, 8])
        height, width = SHAPES.choice([(64, 64), (96, 64), (64, 96), (128, 128), (104, 152)])
        text(words(2 * count, SHAPES.randint(8, 77)))
        x = torch.randn(count, 4, height, width, device=DEVICE, dtype=torch.float16)
        for _ in range(SHAPES.choice([4, 20, 30])):
            with_text, without = model(torch.cat([x, x])).chunk(2)
            x = x - 0.03 * (without + 7.5 * (with_text - without))
        out = decoder(x) if number % 3 else torch.cat([decoder(one) for one in x.split(1)])
        ((out.float().clamp(-1, 1) + 1) * 127.5).to(torch.uint8).cpu()

    until(seconds, 80, step)


@torch.no_grad()
def batches(seconds):
    """A server that owns one block for all its caches, and batches whoever is there: every step is another size."""
    layers, width, heads, page = 16, 2048, 16, 16
    caches = torch.zeros(layers, 2, 4096, page, width, device=DEVICE, dtype=torch.bfloat16)
    embedding = nn.Embedding(VOCABULARY, width).to(DEVICE, torch.bfloat16)
    projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers)).to(DEVICE, torch.bfloat16)
    dense = nn.ModuleList(Dense(width) for _ in range(layers)).to(DEVICE, torch.bfloat16)
    head = nn.Linear(width, VOCABULARY, bias=False).to(DEVICE, torch.bfloat16)
    talks = []

    def step(_):
        fresh = [[0, SHAPES.randint(16, 1500)] for _ in range(SHAPES.choice([0, 0, 0, 1, 1, 2, 4]))]
        tokens = len(talks) + sum(length for _, length in fresh)
        if not tokens:
            return
        x = embedding(words(tokens))
        for number in range(layers):
            query, key, value = projections[number](x).chunk(3, 1)
            slots = torch.randint(4096 * page, (tokens,), device=DEVICE)
            caches[number, 0].view(-1, width)[slots] = key
            caches[number, 1].view(-1, width)[slots] = value
            if talks:
                longest = -(-max(length for _, length in talks) // page)
                pages = torch.randint(4096, (len(talks), longest), device=DEVICE)
                keys = caches[number, 0][pages].view(len(talks), -1, heads, width // heads)
                now = query[: len(talks)].view(len(talks), heads, 1, -1)
                torch.matmul(now, keys.permute(0, 2, 3, 1)).softmax(-1)
            x = x + dense[number](functional.layer_norm(x, (width,)))
        ends = head(x[-max(1, len(talks) + len(fresh)) :]).float()
        ends.softmax(-1).sort(-1, descending=True).values.cumsum(-1).argmax(-1).cpu()
        talks.extend(fresh)
        for talk in talks:
            talk[1] += 1
        talks[:] = [talk for talk in talks if SHAPES.random() > 0.02][-64:]

    until(seconds, 900, step)


def longer(seconds):
    """A curriculum: each sentence is a little longer than the one before, then all begins again with larger batches."""
    layers = nn.LSTM(512, 1024, 3, batch_first=True, dropout=0.1).to(DEVICE)
    convolutions = nn.Sequential(nn.Conv1d(80, 512, 5, 2, 2), nn.GELU(), nn.Conv1d(512, 512, 5, 2, 2), nn.GELU()).to(DEVICE)
    head = nn.Linear(1024, 5000).to(DEVICE)
    optimizer = torch.optim.Adam([*layers.parameters(), *convolutions.parameters(), *head.parameters()], 1e-4)

    def step(number):
        round_, place = divmod(number, 60)
        length = 200 + 25 * place + SHAPES.randint(0, 20)
        count = 12 + 6 * round_
        sounds = torch.randn(count, 80, length, device=DEVICE)
        hidden, _ = layers(convolutions(sounds).transpose(1, 2))
        chances = head(hidden).log_softmax(-1)
        words_ = chances.shape[1] // 4
        loss = functional.ctc_loss(
            chances.transpose(0, 1), torch.randint(1, 5000, (count, words_), device=DEVICE),
            torch.full((count,), chances.shape[1]), torch.full((count,), words_),
        )
        learn(loss, optimizer)

    until(seconds, 240, step)


def between(seconds):
    """Training of a language model that is evaluated with other batches and saved on the device in between."""
    model = Language(12, 1280, 20).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    best = None

    def step(number):
        nonlocal best
        for _ in range(2):
            tokens = words(8, 769)
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % 12 == 11:
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                for _ in range(4):
                    tokens = words(SHAPES.choice([16, 24]), SHAPES.randint(100, 1025))
                    loss_of(model(tokens[:, :-1]), tokens[:, 1:]).item()
                caches, tokens = [[] for _ in model.blocks], words(4, 32)
                for _ in range(60):
                    tokens = model(tokens, caches)[:, -1:].argmax(-1)
            best = copy.deepcopy(model.state_dict())
        if number % 30 == 29:
            model.load_state_dict(best)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    until(seconds, 100, step)


KINDS = {kind.__name__: kind for kind in (answers, twice, gathered, detects, pictures, batches, longer, between)}

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in KINDS:
        sys.exit(f"{__doc__}\nKinds: {', '.join(KINDS)}")
    torch.manual_seed(0)
    record.begin(torch)
    KINDS[sys.argv[1]](float(sys.argv[3]) if len(sys.argv) > 3 else 14)
    cuda = torch.cuda
    print(f"peak {cuda.max_memory_allocated() / 1e9:.2f} GB, reserved {cuda.max_memory_reserved() / 1e9:.2f}")
    record.end(torch, sys.argv[2])
