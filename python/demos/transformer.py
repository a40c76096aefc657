"""A decoder-only transformer, as small as it can be: for `gpt.py`, `lora.py` and `generate.py`."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class LowRank(nn.Module):
    """A frozen linear layer with a low-rank addition that learns."""

    def __init__(self, inner, rank):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        options = {"device": inner.weight.device, "dtype": inner.weight.dtype}
        self.down = nn.Parameter(torch.randn(rank, inner.in_features, **options) / rank)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank, **options))

    def forward(self, x):
        return self.inner(x) + functional.linear(functional.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, cache=None):
        """`cache` is a list: empty, or keys and values of the text before; it gets them of all text."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if cache:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        if cache is not None:
            cache[:] = k, v
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, layers, width, heads, vocabulary, longest, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, text, caches=None):
        before = caches[0][0].shape[2] if caches and caches[0] else 0
        places = torch.arange(before, before + text.shape[1], device=text.device)
        x = self.tokens(text) + self.places(places)
        for number, block in enumerate(self.blocks):
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, None if caches is None else caches[number])
        return self.head(self.norm(x))

    def add_low_rank(self, rank):
        """Freezes everything and gives each block's linear layers something that learns."""
        self.requires_grad_(False)
        for block in self.blocks:
            for name in ("qkv", "out", "up", "down"):
                setattr(block, name, LowRank(getattr(block, name), rank))
        return [parameter for parameter in self.parameters() if parameter.requires_grad]
