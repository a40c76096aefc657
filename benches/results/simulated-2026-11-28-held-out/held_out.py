"""A third set of programs, recorded after the pool had been mended for the second, and what PyTorch's allocator was
asked for in them, as logs for `vpmm replay`: tables of a recommender, speech in batches of equal length, a small
model that drafts for a large one, a server that loads and drops whole models, points in space, players that learn
from what they kept, volumes with a large one now and then, and a mixture of experts whose parts work in turn on two
streams. Nothing is learned: data and weights are random.

    PYTHONPATH=python/demos:benches/results/simulated-2026-11-25-programs python3 held_out.py KIND FILE.csv.gz [SECONDS]
"""

import collections
import sys
import threading

import record
import torch
from programs import DEVICE, SHAPES, Dense, Language, learn, loss_of, until, words
from torch import nn
from torch.nn import functional


def tables(seconds):
    """Twenty tables of which each picture of a user looks up any number of rows; their gradients are sparse."""
    rows = [SHAPES.choice([2_000, 20_000, 200_000, 1_000_000]) for _ in range(20)]
    bags = nn.ModuleList(nn.EmbeddingBag(count, 64, mode="sum", sparse=True) for count in rows).to(DEVICE)
    below = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU()).to(DEVICE)
    above = nn.Sequential(nn.Linear(64 + 210, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)).to(DEVICE)
    sparse = torch.optim.SGD(bags.parameters(), 0.1)
    dense = torch.optim.Adagrad([*below.parameters(), *above.parameters()], 0.01)
    pairs = torch.triu_indices(21, 21, 1, device=DEVICE)

    def step(number):
        count = 16384 if number % 7 else SHAPES.randint(1000, 16384)
        features = [below(torch.randn(count, 13, device=DEVICE))]
        for bag, table in zip(bags, rows, strict=True):
            lengths = torch.randint(0, SHAPES.randint(2, 12), (count,), device=DEVICE)
            offsets = lengths.cumsum(0) - lengths
            features.append(bag(torch.randint(table, (int(lengths.sum()) + 1,), device=DEVICE), offsets))
        together = torch.stack(features, 1)
        crossed = (together @ together.transpose(1, 2))[:, pairs[0], pairs[1]]
        loss = functional.binary_cross_entropy_with_logits(
            above(torch.cat([features[0], crossed], 1)).squeeze(1), torch.rand(count, device=DEVICE)
        )
        loss.backward()
        sparse.step()
        dense.step()
        sparse.zero_grad(set_to_none=True)
        dense.zero_grad(set_to_none=True)

    until(seconds, 150, step)


def speech(seconds):
    """Batches of sounds of much the same length, so many that they come to as much; four of them for each step."""
    front = nn.Sequential(nn.Conv2d(1, 256, 3, 2), nn.ReLU(), nn.Conv2d(256, 256, 3, 2), nn.ReLU()).to(DEVICE)
    into = nn.Linear(256 * 19, 512).to(DEVICE)
    layers = nn.ModuleList(
        nn.ModuleDict({
            "first": Dense(512),
            "attention": nn.MultiheadAttention(512, 8, batch_first=True),
            "gate": nn.Conv1d(512, 1024, 1),
            "deep": nn.Conv1d(512, 512, 31, padding=15, groups=512),
            "norm": nn.BatchNorm1d(512),
            "second": Dense(512),
        })
        for _ in range(16)
    ).to(DEVICE)
    head = nn.Linear(512, 1024).to(DEVICE)
    everything = nn.ModuleList([front, into, layers, head])
    optimizer = torch.optim.AdamW(everything.parameters(), 1e-4, fused=True)

    def hear(sounds):
        x = front(sounds.unsqueeze(1))
        x = into(x.transpose(1, 2).flatten(2))
        for layer in layers:
            x = x + 0.5 * layer["first"](x)
            x = x + layer["attention"](x, x, x, need_weights=False)[0]
            y = functional.glu(layer["gate"](x.transpose(1, 2)), 1)
            x = x + functional.silu(layer["norm"](layer["deep"](y))).transpose(1, 2)
            x = x + 0.5 * layer["second"](x)
        return head(x).float().log_softmax(-1)

    def step(_):
        for _ in range(4):
            length = min(1800, int(SHAPES.lognormvariate(6.6, 0.5)) + 100)
            count = max(1, 24_000 // length)
            with torch.autocast("cuda", torch.bfloat16):
                chances = hear(torch.randn(count, length, 80, device=DEVICE))
            words_ = max(1, chances.shape[1] // 5)
            loss = functional.ctc_loss(
                chances.transpose(0, 1), torch.randint(1, 1024, (count, words_), device=DEVICE),
                torch.full((count,), chances.shape[1]), torch.full((count,), words_),
            )
            (loss / 4).backward()
        nn.utils.clip_grad_norm_(everything.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    until(seconds, 80, step)


@torch.no_grad()
def drafts(seconds):
    """Three threads that answer on streams of their own: a small model says five words ahead, a large one how many of
    them stay; what does not is cut off both caches."""
    large = Language(16, 1536, 24).to(DEVICE, torch.bfloat16).eval()
    small = Language(4, 512, 8).to(DEVICE, torch.bfloat16).eval()

    def cut(caches, length):
        for cache in caches:
            cache[:] = [part[:, :, :length].contiguous() for part in cache]

    def answer(shapes):
        tokens = words(shapes.choice([1, 2, 4, 8]), shapes.randint(20, 900))
        length = tokens.shape[1]
        of_large, of_small = [[] for _ in large.blocks], [[] for _ in small.blocks]
        large(tokens, of_large)
        small(tokens, of_small)
        now = tokens[:, -1:]
        while length < tokens.shape[1] + 60:
            ahead = [now]
            for _ in range(5):
                ahead.append(small(ahead[-1], of_small)[:, -1:].float().softmax(-1).argmax(-1))
            large(torch.cat(ahead, 1), of_large).float().softmax(-1)
            kept = shapes.randint(1, 6)
            length += kept
            cut(of_large, length)
            cut(of_small, length - 1)
            now = ahead[kept - 1]

    def serve(number):
        shapes = type(SHAPES)(number)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            until(seconds, 25, lambda _: answer(shapes))

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@torch.no_grad()
def swaps(seconds):
    """A server of more models than the device is to hold: the one asked for longest ago goes when another comes."""
    kinds = [(6, 512, 8), (12, 768, 12), (12, 1024, 16), (24, 1024, 16), (16, 1536, 12), (8, 2048, 16)]
    there, room = collections.OrderedDict(), 2_600_000_000

    def size(model):
        return sum(p.numel() * p.element_size() for p in model.parameters())

    def step(_):
        name = min(SHAPES.randint(0, 9), SHAPES.randint(0, 9))
        if name not in there:
            with torch.device("meta"):
                model = Language(*kinds[name % len(kinds)]).to(torch.float16)
            while there and size(model) + sum(map(size, there.values())) > room:
                there.popitem(last=False)
            there[name] = model.to_empty(device=DEVICE).eval()
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
        there.move_to_end(name)
        model = there[name]
        for _ in range(SHAPES.randint(1, 6)):
            tokens = words(SHAPES.choice([1, 2, 4, 16]), SHAPES.randint(16, 700))
            caches = [[] for _ in model.blocks]
            for _ in range(SHAPES.randint(1, 12)):
                tokens = model(tokens, caches)[:, -1:].float().softmax(-1).argmax(-1)

    until(seconds, 120, step)


def points(seconds):
    """Points in space, any number of them: unique cells at four sizes, sums over cells, and back."""
    widths = [4, 64, 128, 256, 512]
    downs = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU(), nn.Linear(b, b), nn.ReLU())
                          for a, b in zip(widths, widths[1:], strict=False)).to(DEVICE)
    ups = nn.ModuleList(nn.Sequential(nn.Linear(2 * a, b), nn.LayerNorm(b), nn.ReLU())
                        for a, b in zip(widths[:1:-1], widths[-2:0:-1], strict=True)).to(DEVICE)
    head = nn.Linear(64, 20).to(DEVICE)
    all_of_it = nn.ModuleList([downs, ups, head])
    optimizer = torch.optim.AdamW(all_of_it.parameters(), 1e-3)

    def step(_):
        count = sum(SHAPES.randint(40_000, 180_000) for _ in range(SHAPES.randint(2, 4)))
        places = torch.rand(count, 3, device=DEVICE) ** 2 * 100
        x = torch.cat([places, torch.rand(count, 1, device=DEVICE)], 1)
        stack = []
        for down, side in zip(downs, (0.8, 1.6, 3.2, 6.4), strict=True):
            x = down(x)
            cells, belongs = torch.unique((places / side).long(), dim=0, return_inverse=True)
            sums = torch.zeros(len(cells), x.shape[1], device=DEVICE).index_add(0, belongs, x)
            stack.append((x, belongs))
            x, places = sums / torch.bincount(belongs).unsqueeze(1), (cells + 0.5) * side
        for up, (beside, belongs) in zip(ups, stack[:0:-1], strict=True):
            x = up(torch.cat([x[belongs], beside], 1))
        x = head(x[stack[0][1]])
        loss = functional.cross_entropy(x, torch.randint(20, (count,), device=DEVICE))
        learn(loss, optimizer)

    until(seconds, 120, step)


def players(seconds):
    """Five hundred games at once on the device; what happened is kept there, and learnt from in many small steps."""
    look = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten())
    actor = nn.Sequential(look, nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 18)).to(DEVICE)
    aim = nn.Sequential(*[nn.Linear(3136 if not n else 512, 512) for n in range(2)], nn.Linear(512, 18)).to(DEVICE)
    optimizer = torch.optim.Adam(actor.parameters(), 1e-4)
    kept = torch.zeros(200, 512, 84, 84, dtype=torch.uint8, device=DEVICE)
    chosen = torch.zeros(200, 512, dtype=torch.long, device=DEVICE)
    games = torch.rand(512, 84, 84, device=DEVICE)

    def step(number):
        with torch.no_grad():
            for at in range(8):
                frames = torch.stack([games] * 4, 1)
                move = torch.multinomial(actor(frames).softmax(-1), 1)
                games.add_(0.1 * move.view(-1, 1, 1)).remainder_(1.0)
                ended = torch.where(torch.rand(512, device=DEVICE) < 0.02)[0]
                games[ended] = torch.rand(len(ended), 84, 84, device=DEVICE)
                place = (8 * number + at) % 200
                kept[place] = (games * 255).to(torch.uint8)
                chosen[place] = move.squeeze(1)
        for _ in range(4):
            when, which = torch.randint(4, 200, (256,), device=DEVICE), torch.randint(512, (256,), device=DEVICE)
            frames = torch.stack([kept[when - back, which] for back in range(4)], 1).float() / 255
            values = actor(frames).gather(1, chosen[when, which].unsqueeze(1))
            with torch.no_grad():
                best = aim(look(frames)).max(1, keepdim=True).values
            learn(functional.smooth_l1_loss(values, 0.99 * best), optimizer)

    until(seconds, 250, step)


def volumes(seconds):
    """Pieces of volumes in training; now and then a whole one, of any size, piece by piece into one result."""

    def twice(inputs, outputs):
        return nn.Sequential(*[
            layer
            for a, b in ((inputs, outputs), (outputs, outputs))
            for layer in (nn.Conv3d(a, b, 3, 1, 1), nn.InstanceNorm3d(b), nn.LeakyReLU())
        ])

    widths = [1, 32, 64, 128, 256]
    downs = nn.ModuleList(twice(a, b) for a, b in zip(widths, widths[1:], strict=False)).to(DEVICE)
    ups = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in zip(widths[:1:-1], widths[-2:0:-1], strict=True)).to(DEVICE)
    joins = nn.ModuleList(twice(2 * b, b) for b in widths[-2:0:-1]).to(DEVICE)
    heads = nn.ModuleList(nn.Conv3d(b, 5, 1) for b in widths[-2:0:-1]).to(DEVICE)
    all_of_it = nn.ModuleList([downs, ups, joins, heads])
    optimizer = torch.optim.SGD(all_of_it.parameters(), 0.01, momentum=0.99, nesterov=True)

    def see(x):
        beside, outputs = [], []
        for number, down in enumerate(downs):
            x = down(functional.max_pool3d(x, 2) if number else x)
            beside.append(x)
        for up, join, head, other in zip(ups, joins, heads, beside[-2::-1], strict=True):
            x = join(torch.cat([up(x), other], 1))
            outputs.append(head(x))
        return outputs

    def step(number):
        x = torch.randn(2, 1, 96, 112, 96, device=DEVICE)
        labels = torch.randint(5, (2, 96, 112, 96), device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            outputs = see(x)
        loss = 0
        for part, output in enumerate(reversed(outputs)):
            smaller = labels[:, :: 1 << part, :: 1 << part, :: 1 << part]
            chances = output.float().softmax(1)
            hot = functional.one_hot(smaller, 5).permute(0, 4, 1, 2, 3).float()
            loss = loss + functional.cross_entropy(output.float(), smaller) - (chances * hot).sum() / (chances + hot).sum()
        learn(loss, optimizer)
        if number % 10 == 9:
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                sides = [16 * SHAPES.randint(8, 20) for _ in range(3)]
                whole = torch.randn(1, 1, *sides, device=DEVICE)
                result = torch.zeros(1, 5, *sides, device=DEVICE)
                for z in range(0, sides[0] - 95, 48):
                    for y in range(0, sides[1] - 95, 48):
                        piece = whole[:, :, z : z + 96, y : y + 96, : sides[2] // 16 * 16]
                        result[:, :, z : z + 96, y : y + 96, : sides[2] // 16 * 16] += see(piece)[-1].float()
                result.argmax(1).to(torch.uint8).cpu()

    until(seconds, 120, step)


def experts(seconds):
    """Two halves of each batch in turn on two streams: while one is sorted to its experts the other attends. No
    expert has a fixed place for what it gets."""
    model = Language(8, 1024, 16).to(DEVICE, torch.bfloat16)
    gates = nn.ModuleList(nn.Linear(1024, 32, bias=False) for _ in model.blocks).to(DEVICE, torch.bfloat16)
    firsts = nn.ParameterList(torch.randn(32, 1024, 1408) * 0.02 for _ in model.blocks).to(DEVICE, torch.bfloat16)
    seconds_ = nn.ParameterList(torch.randn(32, 1408, 1024) * 0.02 for _ in model.blocks).to(DEVICE, torch.bfloat16)
    parameters = [*model.parameters(), *gates.parameters(), *firsts, *seconds_]
    optimizer = torch.optim.AdamW(parameters, 1e-4, foreach=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def dispatch(number, x):
        flat = x.reshape(-1, 1024)
        weights, chosen = gates[number](flat).float().softmax(-1).topk(4)
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=32).tolist()
        sent = flat.repeat_interleave(4, 0)[order]
        parts = [
            functional.silu(part @ firsts[number][expert]) @ seconds_[number][expert]
            for expert, part in enumerate(sent.split(counts))
        ]
        back = torch.empty_like(sent).index_copy(0, order, torch.cat(parts))
        back = back.view(-1, 4, 1024) * weights.to(x.dtype).unsqueeze(-1)
        return back.sum(1).view(x.shape)

    def step(_):
        main = torch.cuda.current_stream()
        tokens = words(2 * SHAPES.choice([2, 4, 4]), SHAPES.choice([512, 1024, 1024, 1536]) + 1)
        losses = []
        halves = [model.embedding(half[:, :-1]) for half in tokens.chunk(2)]
        for stream in streams:
            stream.wait_stream(main)
        for number, block in enumerate(model.blocks):
            for half, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    x = halves[half]
                    x = x + block.attention(block.before(x))
                    halves[half] = x + dispatch(number, block.between(x))
        for half, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                losses.append(loss_of(model.head(model.norm(halves[half])), tokens.chunk(2)[half][:, 1:]))
        for half, stream in zip(halves, streams, strict=True):
            half.record_stream(main)
            main.wait_stream(stream)
        learn(sum(losses) / 2, optimizer)

    until(seconds, 40, step)


KINDS = {kind.__name__: kind for kind in (tables, speech, drafts, swaps, points, players, volumes, experts)}

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in KINDS:
        sys.exit(f"{__doc__}\nKinds: {', '.join(KINDS)}")
    torch.manual_seed(0)
    record.begin(torch)
    KINDS[sys.argv[1]](float(sys.argv[3]) if len(sys.argv) > 3 else 14)
    cuda = torch.cuda
    print(f"peak {cuda.max_memory_allocated() / 1e9:.2f} GB, reserved {cuda.max_memory_reserved() / 1e9:.2f}")
    record.end(torch, sys.argv[2])
