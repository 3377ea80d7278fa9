"""A short training run: a character model whose loss follows that of the same model on the eager definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fagen
from fagen import reference
from fagen.spec import AttentionSpec

TEXT = Path(__file__).parents[1] / "LICENSE"
HEADS, HEADS_K, HEAD_DIM = 2, 1, 32
WIDTH = HEADS * HEAD_DIM
LAYERS = 2
CALL = {"softcap": 5.0, "dropout_p": 0.1}

Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # q, k, v, seed of the dropout; o


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm. The attention is in bf16."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * HEAD_DIM)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, seed: int) -> Tensor:
        heads = self.qkv(self.norms[0](x)).bfloat16().unflatten(2, (HEADS + 2 * HEADS_K, HEAD_DIM))
        q, k, v = heads.split((HEADS, HEADS_K, HEADS_K), 2)
        x = x + self.out(self.attention(q, k, v, seed).flatten(2).to(x.dtype))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Logits of the next character."""

    def __init__(self, attention: Attention, characters: int, seqlen: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(seqlen, WIDTH))
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, tokens: Tensor, seed: int) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer, block in enumerate(self.blocks):
            x = block(x, seed * LAYERS + layer)
        return self.head(x)


def train(attention: Attention, device: str, steps: int, batch: int, seqlen: int) -> Tensor:
    """The loss of each step."""
    torch.manual_seed(0)
    text = TEXT.read_text()
    characters = sorted(set(text))
    tokens = torch.tensor([characters.index(c) for c in text])
    model = Model(attention, len(characters), seqlen).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(tokens) - seqlen, (batch,))
        window = tokens[starts[:, None] + torch.arange(seqlen + 1)].to(device)
        logits = model(window[:, :-1], step)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("device", "steps", "batch", "seqlen"),
    [("cpu", 200, 1, 64), pytest.param("cuda", 400, 16, 200, marks=pytest.mark.gpu)],
)
def test_a_character_model_learns_as_the_eager_one_does(device: str, steps: int, batch: int, seqlen: int) -> None:
    """Softcap, causal, dropout and grouped heads: the same masks, so that the two losses part by rounding alone."""
    spec = AttentionSpec(head_dim=HEAD_DIM, causal=True, softcap=True, dropout=True, backward=True)
    attn = fagen.load(spec, emulate=device == "cpu")

    def by_kernel(q: Tensor, k: Tensor, v: Tensor, seed: int) -> Tensor:
        return attn(q, k, v, seed=seed, **CALL)

    def eager(q: Tensor, k: Tensor, v: Tensor, seed: int) -> Tensor:
        o: Tensor = reference.attention(q, k, v, causal=True, seed=seed, return_lse=False, **CALL)
        return o.bfloat16()

    losses, expected = (train(attention, device, steps, batch, seqlen) for attention in (by_kernel, eager))
    assert losses.isfinite().all() and expected[-20:].mean() < 0.8 * expected[:20].mean()
    torch.testing.assert_close(losses[:20], expected[:20], rtol=5e-3, atol=0)
    smooth = losses.unfold(0, 20, 20).mean(1), expected.unfold(0, 20, 20).mean(1)
    torch.testing.assert_close(*smooth, rtol=2e-2, atol=0)
