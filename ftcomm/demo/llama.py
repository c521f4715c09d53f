"""A small decoder-only transformer on bytes, of the shape of Llama: rotary attention, SwiGLU, RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


class LlamaBlock(nn.Module):  # type: ignore[misc]
    """Pre-norm, rotary attention, SwiGLU."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor) -> Tensor:  # [batch, heads, time, size]
    time, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.outer(torch.arange(time), 10_000.0 ** (-torch.arange(half) / half))
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Llama(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Mean cross-entropy, in nats a byte, of predicting each byte of `text` (int64 [batch, time + 1])."""
        x = self.byte(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())
