"""Trains ResNet-50 on random pictures of varying number and size, which are copied from pinned memory on a
side stream while the step before runs."""

import random

from workload import arguments, choose, run

args = arguments(__doc__, batch=(int, 96), largest=(int, 288), classes=(int, 1000))
torch = choose(args)

from torch import nn
from torch.nn import functional


class Bottleneck(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.side = nn.Identity()
        if stride != 1 or width_in != 4 * width:
            self.side = nn.Sequential(
                nn.Conv2d(width_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        return functional.relu(self.body(x) + self.side(x))


def resnet50(classes):
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        # In place of the largest, whose gradient PyTorch adds up in no fixed order on a GPU.
        nn.AvgPool2d(3, 2, 1),
    ]
    width_in = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(width_in, width, stride if number == 0 else 1))
            width_in = 4 * width
    return nn.Sequential(*layers), nn.Linear(width_in, classes)


body, head = resnet50(args.classes)
body, head = body.cuda().to(memory_format=torch.channels_last), head.cuda()
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01, momentum=0.9)
shapes = random.Random(args.seed)
sampler = torch.Generator().manual_seed(args.seed)
loading = torch.cuda.Stream()
store = torch.randn(args.batch * 3 * args.largest**2, generator=sampler).pin_memory()


def load():
    """The next pictures, on their way to the device."""
    batch = shapes.randint(max(1, args.batch // 3), args.batch)
    size = shapes.randrange(128, args.largest + 1, 32)
    pictures = store[: batch * 3 * size * size].view(batch, 3, size, size)
    kinds = torch.randint(args.classes, (batch,), generator=sampler).pin_memory()
    with torch.cuda.stream(loading):
        return pictures.to("cuda", non_blocking=True), kinds.to("cuda", non_blocking=True)


ahead = load()


def step(number):
    global ahead
    now = torch.cuda.current_stream()
    now.wait_stream(loading)
    pictures, kinds = ahead
    pictures.record_stream(now)
    kinds.record_stream(now)
    ahead = load()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        features = body(pictures.contiguous(memory_format=torch.channels_last)).mean((2, 3))
        scores = head(features)
    loss = functional.cross_entropy(scores.float(), kinds)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


run(args, torch, step, shapes, sampler)
