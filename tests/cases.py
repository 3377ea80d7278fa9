"""The tables of kernels, shapes and features that the tests run, emulated and on a GPU: CASES, and GRADIENTS both ways.

Rows are grouped by spec, since a spec is one compile. Rows marked `large` run on a GPU only. A new score modification
adds a row to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fagen.call import DTYPES
from fagen.check import Case, alibi_slopes_per_batch
from fagen.spec import AttentionSpec


def _rows(head_dim: int, *calls: dict[str, Any], dtype: str = "bf16", dv: int | None = None, **on: bool) -> list[Case]:
    spec = AttentionSpec(head_dim=head_dim, head_dim_v=dv, dtype=dtype, **on)
    return [Case(spec=spec, **call) for call in calls]


def _gradients(head_dim: int, *calls: dict[str, Any], **on: Any) -> list[Case]:
    return _rows(head_dim, *calls, backward=True, **on)


def _at(seqlen_q: int, seqlen_k: int, **more: Any) -> dict[str, Any]:
    return {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **more}


def _heads(heads: int, heads_k: int) -> dict[str, int]:
    return {"heads": heads, "heads_k": heads_k}


def _large(seqlen_q: int, seqlen_k: int, **more: Any) -> dict[str, Any]:
    return _at(seqlen_q, seqlen_k, large=True, **{"batch": 2, **_heads(8, 2), **more})


# Lengths at the edges of 16-row fragments and of tiles of 64 and 128. The budget is that of a norm: a single row takes
# more heads to make one.
EDGES = [
    *(
        _at(q, k)
        for q, k in [(0, 5), (1, 1), (2, 15), (15, 2), (16, 16), (17, 64), (63, 65), (64, 63), (65, 17), (127, 1)]
    ),
    _at(1, 129, **_heads(32, 16)),
    _at(129, 127),
]
LARGE = [_large(1024, 1024), _large(1, 4096), _large(2049, 517), _large(777, 3001)]

# Every head dim from 8 to 256 in steps that meet each way of padding, both types; no features.
HEAD_DIMS = [
    *_rows(8, _at(33, 65), _at(1, 16)),
    *_rows(16, _at(64, 17), dtype="fp16"),
    *_rows(24, _at(65, 33), _at(3, 2)),
    *_rows(40, _at(17, 129), _at(70, 64, layout="sliced"), dtype="fp16"),
    *_rows(48, _at(64, 64)),
    *_rows(64, *EDGES, _at(5, 0), *LARGE),
    *_rows(64, _at(200, 200, batch=2, **_heads(4, 4)), _at(31, 33), *LARGE, dtype="fp16"),
    *_rows(72, _at(33, 70, layout="sliced"), _at(1, 1)),
    *_rows(80, _at(65, 65), dtype="fp16"),
    *_rows(96, _at(40, 100), _large(515, 515)),
    *_rows(112, _at(16, 80), dtype="fp16"),
    *_rows(128, _at(64, 64), _at(1, 200, **_heads(16, 1)), _at(130, 63), *LARGE),
    *_rows(128, _at(65, 127), *LARGE, dtype="fp16"),
    *_rows(136, _at(33, 33)),
    *_rows(160, _at(17, 65), dtype="fp16"),
    *_rows(192, _at(65, 64), _large(515, 1000)),
    *_rows(200, _at(20, 40), dtype="fp16"),
    *_rows(256, _at(64, 65), _at(2, 130, **_heads(8, 4)), *LARGE),
    *_rows(256, _at(17, 17), _large(515, 515), dtype="fp16"),
]

HEAD_DIMS_V = [
    *_rows(64, _at(65, 64), _large(515, 515), dv=128),
    *_rows(128, _at(17, 65), dv=64, dtype="fp16"),
    *_rows(192, _at(64, 40), _large(1024, 1024), dv=128, causal=True),
    *_rows(8, _at(33, 33), dv=256),
    *_rows(256, _at(65, 70), dv=8),
    *_rows(40, _at(65, 17), dv=104, dtype="fp16", causal=True),
]

HEADS = _rows(
    32,
    _at(33, 40, batch=2, **_heads(4, 4)),
    _at(33, 40, batch=2, **_heads(6, 3)),
    _at(33, 40, batch=3, **_heads(4, 1)),
    _at(20, 20, **_heads(1, 1)),
    _at(20, 20, batch=0),
    _at(64, 64, softmax_scale=1.0),
    _at(64, 64, softmax_scale=0.01),
    _large(515, 600, batch=3, **_heads(48, 6)),
    _large(1, 1, batch=70000, **_heads(1, 1)),
    _large(1, 1, batch=1, **_heads(70000, 70000)),
)

LAYOUTS = [
    *_rows(
        64,
        *(_at(65, 40, batch=2, layout=name) for name in ("transposed", "sliced", "expanded")),
        dtype="fp16",
        causal=True,
    ),
    *_rows(128, *(_at(20, 33, batch=2, **_heads(4, 2), layout=name) for name in ("transposed", "sliced", "expanded"))),
    *_rows(64, *(_large(600, 700, layout=name) for name in ("transposed", "sliced", "expanded"))),
]

CAUSAL = [
    *_rows(64, *EDGES, _at(200, 200), _at(40, 0), *LARGE, causal=True),
    *_rows(128, _at(65, 65), _at(16, 80), _at(80, 16), _at(129, 64), *LARGE, causal=True, dtype="fp16"),
    *_rows(256, _at(40, 70), _large(515, 515), causal=True),
]

WINDOWS = [(0, 0), (3, 0), (0, 3), (-1, 0), (-1, 5), (5, -1), (16, 16), (70, 1), (-1, -1), (1000, 1000)]
WINDOW = [
    *_rows(
        64,
        *(_at(65, 90, window=window) for window in WINDOWS),
        *(_at(90, 33, window=window) for window in [(0, 0), (5, -1), (-1, 5)]),
        _at(200, 200, window=(40, 10)),
        *(_large(1500, 1500, window=window) for window in [(0, 0), (128, 0), (-1, 100), (300, -1), (255, 255)]),
        *(_large(300, 2500, window=window) for window in [(200, 100), (1, 1)]),
        window=True,
    ),
    *_rows(
        64,
        *(_at(65, 90, window=window) for window in [(0, 0), (3, 0), (3, 9), (-1, 4), (70, -1)]),
        _at(90, 33, window=(20, 3)),
        _at(200, 200, window=(64, 0)),
        *(_large(1500, 1500, window=window) for window in [(128, 0), (300, 5)]),
        dtype="fp16",
        window=True,
        causal=True,
    ),
    *_rows(128, _at(100, 130, window=(20, 30)), _at(1, 130, window=(50, 0)), window=True),
]

SOFTCAP = [
    *_rows(
        64,
        _at(64, 64),
        _at(33, 65, values={"softcap": 50.0}),
        _at(17, 17, values={"softcap": 0.5}),
        _at(3, 3, values={"softcap": 15}),
        *LARGE,
        softcap=True,
    ),
    *_rows(128, _at(65, 65), _at(70, 20, values={"softcap": 30.0}), *LARGE, softcap=True, causal=True),
    *_rows(256, _at(33, 64, values={"softcap": 50.0}), *LARGE, softcap=True, causal=True, dtype="fp16"),
]

PER_BATCH = {"values": {"alibi_slopes": alibi_slopes_per_batch}}
ALIBI = [
    *_rows(64, _at(64, 64, **_heads(8, 2)), _at(33, 70, batch=2, **PER_BATCH), _at(70, 33), *LARGE, alibi=True),
    *_rows(
        128,
        _at(65, 65),
        _at(20, 40, batch=2, **_heads(4, 4), **PER_BATCH),
        _large(1024, 1024, **PER_BATCH),
        alibi=True,
        causal=True,
        dtype="fp16",
    ),
]


def bias_of_heads(case: Case, generator: torch.Generator) -> torch.Tensor:
    """(Hq, Sq, Sk) in the spec's dtype, the queries next to each other in memory."""
    x = torch.randn(case.heads, case.seqlen_k, case.seqlen_q, generator=generator)
    return x.to(DTYPES[case.spec.dtype]).transpose(1, 2)


def bias_of_keys(case: Case, generator: torch.Generator) -> torch.Tensor:
    """(B, 1, 1, Sk), float32: -inf for the last third of the keys, of the last batch entry for all."""
    x = torch.randn(case.batch, 1, 1, case.seqlen_k, generator=generator)
    x[..., 2 * case.seqlen_k // 3 :] = -math.inf
    x[case.batch - 1] = -math.inf
    return x


def bias_expanded(case: Case, generator: torch.Generator) -> torch.Tensor:
    """(B, Hq, Sq, Sk), float32, the same for all batch entries and a slice of what is NaN elsewhere."""
    parent = torch.full((1, case.heads, case.seqlen_q + 2, case.seqlen_k + 5), math.nan)
    x = parent[:, :, 1:-1, 3:-2]
    x.copy_(torch.randn(x.shape, generator=generator))
    return x.expand(case.batch, -1, -1, -1)


def mask_of_keys(case: Case, generator: torch.Generator) -> torch.Tensor:
    """(B, 1, Sq, Sk), bool: a third of the keys is hidden, and all of them from the first query."""
    mask = torch.rand(case.batch, 1, case.seqlen_q, case.seqlen_k, generator=generator) < 2 / 3
    mask[:, :, 0] = False
    return mask


def _biases(*makers: Callable[[Case, torch.Generator], torch.Tensor]) -> list[dict[str, Any]]:
    return [{"values": {"bias": maker}} for maker in makers]


OF_HEADS, OF_KEYS, EXPANDED, MASK = _biases(bias_of_heads, bias_of_keys, bias_expanded, mask_of_keys)
BIAS = [
    *_rows(
        64,
        _at(64, 64, **_heads(4, 2)),
        _at(65, 70, batch=2, **OF_HEADS),
        _at(33, 130, batch=2, **OF_KEYS),
        _at(129, 65, batch=2, **EXPANDED),
        _at(70, 33, batch=2, **MASK),
        *LARGE,
        bias=True,
    ),
    *_rows(128, _at(65, 65, **OF_HEADS), _at(40, 100, batch=2, **MASK), *LARGE, bias=True, causal=True, dtype="fp16"),
    *_rows(
        64,
        _at(3, 300, batch=2, **_heads(8, 2), **MASK),
        _at(5, 200, batch=2, **_heads(6, 3), **OF_HEADS),
        _large(1, 9000),
        bias=True,
        split_kv=True,
    ),
    *_rows(64, _at(2, 77, batch=2, **_heads(4, 2)), bias=True, split_kv=True, paged=True, causal=True, dtype="fp16"),
]

SINKS = [
    *_rows(64, _at(65, 70, batch=2, **_heads(4, 2)), _at(70, 33), _at(5, 0), *LARGE, sink=True, causal=True),
    *_rows(
        64, _at(3, 300, batch=2, **_heads(8, 2)), _at(2, 500, num_splits=5), _large(1, 9000), sink=True, split_kv=True
    ),
    *_rows(64, _at(130, 100, batch=3, **_heads(4, 2)), sink=True, varlen=True, causal=True),
]

DROPOUT = [
    *_rows(
        64,
        _at(64, 64),
        _at(33, 70, batch=2, **_heads(4, 2), dropout_p=0.5, seed=2**40 + 3),
        _at(17, 15, dropout_p=0.0),
        _at(65, 40, dropout_p=0.9, seed=7),
        *(_large(1024, 1024, dropout_p=p, seed=2**63 + 1) for p in (0.1, 0.7)),
        dropout=True,
    ),
    *_rows(128, _at(65, 65), _large(515, 777), dropout=True, causal=True, dtype="fp16"),
]

# Every pair of features that no group above has, and the whole lot.
PAIRS = [
    *_rows(32, _at(65, 70), window=True, softcap=True),
    *_rows(32, _at(70, 65, **_heads(4, 2)), window=True, alibi=True, dtype="fp16"),
    *_rows(32, _at(65, 70), window=True, dropout=True),
    *_rows(32, _at(40, 70), softcap=True, alibi=True, dtype="fp16"),
    *_rows(32, _at(70, 40), softcap=True, dropout=True),
    *_rows(32, _at(40, 70, batch=2, **PER_BATCH), alibi=True, dropout=True, dtype="fp16"),
    *_rows(
        64,
        _at(65, 70, batch=2, **_heads(4, 2), window=(30, 2), **PER_BATCH),
        _at(90, 33, window=(10, 10), layout="sliced"),
        _at(7, 0),
        _large(1000, 1300, window=(400, 0)),
        causal=True,
        window=True,
        softcap=True,
        alibi=True,
        dropout=True,
    ),
    *_rows(
        136,
        _at(33, 40, window=(20, 7)),
        _large(600, 600, window=(300, 50)),
        dv=72,
        dtype="fp16",
        window=True,
        softcap=True,
        alibi=True,
        dropout=True,
    ),
]

# Packed sequences; their lengths fall in q and rise in k.
VARLEN = [
    *_rows(
        64,
        _at(130, 200, batch=4, **_heads(4, 2)),
        _at(1, 129, batch=3, **_heads(32, 16)),
        _at(3, 5, batch=7),
        _at(40, 70, batch=0),
        _at(65, 70, batch=2, layout="sliced"),
        _large(1500, 1100, batch=5),
        varlen=True,
    ),
    *_rows(128, _at(200, 150, batch=3), _large(900, 2000, batch=6), varlen=True, causal=True, dtype="fp16"),
    *_rows(
        72,
        _at(90, 100, batch=3, window=(20, 9), **PER_BATCH),
        _large(700, 800, batch=4, window=(300, 50)),
        dv=40,
        varlen=True,
        window=True,
        softcap=True,
        alibi=True,
        dropout=True,
    ),
]

# Keys in parts: few queries and many keys, heads that share keys in one tile, and what forbids that.
SPLIT = [
    *_rows(
        64,
        _at(1, 1000, batch=2, **_heads(8, 2)),
        _at(5, 333, **_heads(8, 1)),
        _at(70, 200),
        _at(16, 3),
        _at(1, 700, **_heads(24, 24), layout="sliced"),
        _large(1, 16384),
        split_kv=True,
    ),
    *_rows(128, _at(3, 500, **_heads(8, 2)), _large(4, 5000), split_kv=True, causal=True, dtype="fp16"),
    *_rows(
        72,
        _at(5, 400, **_heads(6, 2), window=(150, 9)),
        _large(16, 3000, window=(700, 0)),
        dv=40,
        split_kv=True,
        window=True,
        softcap=True,
    ),
    *_rows(64, _at(5, 300, batch=2, **_heads(4, 2), **PER_BATCH), split_kv=True, causal=True, alibi=True, dropout=True),
    *_rows(64, _at(3, 500, batch=3, **_heads(8, 2)), _large(1, 9000), split_kv=True, paged=True, causal=True),
    *_rows(72, _at(1, 77, batch=2, **_heads(8, 4)), dv=40, dtype="fp16", split_kv=True, paged=True, softcap=True),
    *_rows(128, _at(150, 170, batch=3, **_heads(4, 2)), varlen=True, paged=True, window=True, alibi=True),
]

CASES: list[Case] = [
    *HEAD_DIMS,
    *HEAD_DIMS_V,
    *HEADS,
    *LAYOUTS,
    *CAUSAL,
    *WINDOW,
    *SOFTCAP,
    *ALIBI,
    *BIAS,
    *SINKS,
    *DROPOUT,
    *VARLEN,
    *SPLIT,
    *PAIRS,
]

# Both ways. Lengths at the edges of the backward's tiles of queries and keys, and of fragments.
GRADIENT_EDGES = [
    *(_at(q, k) for q, k in [(0, 5), (1, 1), (2, 15), (16, 16), (17, 64), (63, 65), (65, 17), (127, 3)]),
    _at(15, 2, **_heads(32, 16)),
    _at(1, 129, **_heads(32, 16)),
    _at(129, 127),
    _at(5, 0),
    _at(65, 129, lse_gradient=True),
]
LARGE_GRADIENTS = [_large(1024, 1024), _large(1, 4096), _large(2049, 517, lse_gradient=True), _large(777, 3001)]

GRADIENT_HEAD_DIMS = [
    *_gradients(8, _at(33, 65), _at(1, 16)),
    *_gradients(24, _at(65, 33), dtype="fp16"),
    *_gradients(40, _at(17, 129), _at(70, 64, layout="sliced"), dtype="fp16"),
    *_gradients(64, *GRADIENT_EDGES, *LARGE_GRADIENTS),
    *_gradients(64, _at(200, 200, batch=2, **_heads(4, 4)), *LARGE_GRADIENTS, dtype="fp16"),
    *_gradients(72, _at(33, 70, layout="sliced"), _at(130, 65)),
    *_gradients(96, _at(40, 100), _large(515, 515)),
    *_gradients(128, _at(130, 63), _at(64, 64), _at(1, 200, **_heads(16, 1)), *LARGE_GRADIENTS),
    *_gradients(136, _at(33, 70), dtype="fp16"),
    *_gradients(192, _at(65, 64), _large(515, 1000), dtype="fp16"),
    *_gradients(200, _at(20, 40)),
    *_gradients(256, _at(64, 65), _at(130, 66, **_heads(4, 2)), *LARGE_GRADIENTS),
    *_gradients(256, _at(33, 17), _large(515, 515), dtype="fp16"),
]

GRADIENT_HEAD_DIMS_V = [
    *_gradients(64, _at(65, 64), _large(515, 515), dv=128),
    *_gradients(128, _at(17, 65, lse_gradient=True), dv=64, dtype="fp16"),
    *_gradients(192, _at(64, 40), _large(1024, 1024), dv=128, causal=True),
    *_gradients(8, _at(33, 33), dv=256, dtype="fp16"),
    *_gradients(256, _at(65, 70), dv=8),
]

GRADIENT_HEADS = _gradients(
    32,
    _at(33, 40, batch=2, **_heads(4, 4)),
    _at(33, 40, batch=2, **_heads(6, 3)),
    _at(33, 40, batch=3, **_heads(4, 1)),
    _at(20, 20, **_heads(1, 1)),
    _at(20, 20, batch=0),
    _at(64, 64, softmax_scale=0.5),
    _at(64, 64, softmax_scale=0.01),
    _large(515, 600, batch=3, **_heads(48, 6)),
)

GRADIENT_CAUSAL = [
    *_gradients(
        64,
        *GRADIENT_EDGES,
        _at(200, 200, lse_gradient=True),
        *(_at(65, 40, batch=2, layout=name, lse_gradient=True) for name in ("transposed", "sliced", "expanded")),
        *(_large(600, 700, layout=name) for name in ("transposed", "sliced", "expanded")),
        *LARGE_GRADIENTS,
        causal=True,
    ),
    *_gradients(128, _at(65, 65), _at(16, 80), _at(80, 16), _at(140, 64), *LARGE_GRADIENTS, causal=True, dtype="fp16"),
    *_gradients(256, _at(40, 70), _at(100, 100, **_heads(4, 2)), *LARGE_GRADIENTS, causal=True),
]

GRADIENT_WINDOW = [
    *_gradients(
        64,
        *(_at(65, 90, window=window) for window in WINDOWS),
        *(_at(90, 33, window=window) for window in [(0, 0), (5, -1), (-1, 5)]),
        _at(200, 200, window=(40, 10), lse_gradient=True),
        *(_large(1500, 1500, window=window) for window in [(128, 0), (-1, 100), (300, -1), (255, 255)]),
        *(_large(300, 2500, window=window) for window in [(200, 100), (1, 1)]),
        window=True,
    ),
    *_gradients(
        128,
        *(_at(65, 90, window=window) for window in [(3, 0), (3, 9), (-1, 4), (70, -1)]),
        _at(90, 33, window=(20, 3)),
        _at(150, 150, window=(64, 0)),
        *(_large(1500, 1500, window=window) for window in [(128, 0), (300, 5)]),
        dtype="fp16",
        window=True,
        causal=True,
    ),
]

GRADIENT_SOFTCAP = [
    *_gradients(
        64,
        _at(64, 64),
        _at(33, 65, values={"softcap": 50.0}),
        _at(17, 17, values={"softcap": 0.5}),
        _at(65, 70, values={"softcap": 15}, lse_gradient=True),
        *LARGE_GRADIENTS,
        softcap=True,
    ),
    *_gradients(
        128,
        _at(65, 65),
        _at(70, 20, values={"softcap": 30.0}),
        *LARGE_GRADIENTS,
        softcap=True,
        causal=True,
        dtype="fp16",
    ),
    *_gradients(256, _at(65, 70, values={"softcap": 50.0}), *LARGE_GRADIENTS, softcap=True, causal=True),
]

GRADIENT_ALIBI = [
    *_gradients(64, _at(64, 64, **_heads(8, 2)), _at(33, 70, batch=2, **PER_BATCH), _at(70, 33), alibi=True),
    *_gradients(
        128,
        _at(65, 65),
        _at(20, 40, batch=2, **_heads(4, 4), **PER_BATCH),
        _large(1024, 1024, **PER_BATCH),
        alibi=True,
        causal=True,
        dtype="fp16",
    ),
]

GRADIENT_BIAS = [
    *_gradients(
        64,
        _at(64, 64, **_heads(8, 2)),
        _at(65, 70, batch=2, lse_gradient=True, **OF_HEADS),
        _at(33, 130, batch=3, **OF_KEYS),
        _at(129, 65, batch=2, **EXPANDED),
        _at(70, 33, batch=2, **MASK),
        _at(5, 0),
        _large(1024, 1024),
        _large(777, 1001, **OF_HEADS),
        bias=True,
    ),
    *_gradients(
        72,
        _at(65, 70, batch=2, window=(30, 2), **OF_HEADS),
        _at(90, 33, window=(10, 10)),
        dv=40,
        dtype="fp16",
        bias=True,
        window=True,
        softcap=True,
        alibi=True,
        dropout=True,
    ),
    *_gradients(
        64,
        _at(65, 70, batch=2, **_heads(4, 2), **OF_HEADS),
        _at(70, 65, batch=2, **OF_KEYS),
        _large(515, 777, **OF_HEADS),
        bias=True,
        causal=True,
        deterministic=True,
    ),
    *_gradients(256, _at(65, 90, **_heads(4, 2)), _large(515, 515), bias=True, causal=True),
    *_gradients(136, _at(70, 130, batch=2, **OF_HEADS), dtype="fp16", bias=True, softcap=True, dropout=True),
]

GRADIENT_SINKS = [
    *_gradients(
        64,
        _at(65, 70, batch=2, **_heads(4, 2)),
        _at(70, 33, lse_gradient=True),
        *LARGE_GRADIENTS,
        sink=True,
        causal=True,
    ),
    *_gradients(64, _at(65, 70, lse_gradient=True), sink=True, softcap=True, dropout=True, deterministic=True),
    *_gradients(
        72, _at(130, 100, batch=3, lse_gradient=True), dv=40, dtype="fp16", sink=True, varlen=True, causal=True
    ),
]

GRADIENT_DROPOUT = [
    *_gradients(
        64,
        _at(64, 64),
        _at(33, 70, batch=2, **_heads(4, 2), dropout_p=0.5, seed=2**40 + 3),
        _at(33, 35, dropout_p=0.0, lse_gradient=True),
        _at(65, 70, dropout_p=0.8, seed=7),
        *(_large(1024, 1024, dropout_p=p, seed=2**63 + 1) for p in (0.1, 0.7)),
        dropout=True,
    ),
    *_gradients(128, _at(65, 65), _large(515, 777), dropout=True, causal=True, dtype="fp16"),
    *_gradients(256, _at(40, 70), dropout=True),
]

GRADIENT_PAIRS = [
    *_gradients(32, _at(65, 70), window=True, softcap=True),
    *_gradients(32, _at(70, 65, **_heads(4, 2)), window=True, dropout=True, dtype="fp16"),
    *_gradients(32, _at(70, 40), softcap=True, dropout=True),
    *_gradients(32, _at(40, 70, batch=2, **PER_BATCH), softcap=True, alibi=True, dtype="fp16"),
    *_gradients(
        64,
        _at(65, 70, batch=2, **_heads(4, 2), window=(30, 2), lse_gradient=True, **PER_BATCH),
        _at(90, 33, window=(10, 10), layout="sliced"),
        _at(7, 0),
        _large(1000, 1300, window=(400, 0)),
        causal=True,
        window=True,
        softcap=True,
        alibi=True,
        dropout=True,
    ),
    *_gradients(
        136,
        _at(33, 40, window=(20, 7)),
        _large(600, 600, window=(300, 50)),
        dv=72,
        dtype="fp16",
        window=True,
        softcap=True,
        alibi=True,
        dropout=True,
    ),
]

# dQ by a kernel of its own.
DETERMINISTIC = [
    *_gradients(
        64,
        *GRADIENT_EDGES,
        _at(200, 200, **_heads(4, 2)),
        _at(90, 33),
        *LARGE_GRADIENTS,
        causal=True,
        deterministic=True,
    ),
    *_gradients(72, _at(130, 65, layout="sliced"), _large(515, 515), dtype="fp16", deterministic=True),
    *_gradients(128, _at(70, 130, batch=2), *LARGE_GRADIENTS, causal=True, deterministic=True),
    *_gradients(256, _at(65, 70, **_heads(4, 2)), *LARGE_GRADIENTS, causal=True, deterministic=True),
    *_gradients(64, _at(65, 40, lse_gradient=True), dv=128, deterministic=True),
    *_gradients(
        40,
        _at(77, 90, batch=2, **_heads(4, 2), window=(20, 9), lse_gradient=True),
        _at(90, 33, window=(10, 10)),
        dv=72,
        window=True,
        softcap=True,
        alibi=True,
        dropout=True,
        deterministic=True,
    ),
]

GRADIENT_VARLEN = [
    *_gradients(
        64,
        _at(130, 200, batch=4, **_heads(4, 2)),
        _at(3, 5, batch=7, lse_gradient=True),
        _at(65, 70, batch=2, layout="sliced"),
        _large(1500, 1100, batch=5),
        varlen=True,
    ),
    *_gradients(128, _at(200, 150, batch=3), _large(900, 2000, batch=6), varlen=True, causal=True, dtype="fp16"),
    *_gradients(
        72,
        _at(90, 100, batch=3, window=(20, 9), lse_gradient=True, **PER_BATCH),
        dv=40,
        varlen=True,
        window=True,
        softcap=True,
        alibi=True,
        dropout=True,
    ),
    *_gradients(64, _at(150, 140, batch=3, **_heads(4, 2)), varlen=True, causal=True, deterministic=True),
]

GRADIENTS: list[Case] = [
    *GRADIENT_HEAD_DIMS,
    *GRADIENT_HEAD_DIMS_V,
    *GRADIENT_HEADS,
    *GRADIENT_CAUSAL,
    *GRADIENT_WINDOW,
    *GRADIENT_SOFTCAP,
    *GRADIENT_ALIBI,
    *GRADIENT_BIAS,
    *GRADIENT_SINKS,
    *GRADIENT_DROPOUT,
    *GRADIENT_PAIRS,
    *DETERMINISTIC,
    *GRADIENT_VARLEN,
]


# Rows whose budget in fp16 no kernel keeps: a norm of two rows of 8 elements, and gradients that are 0 by cancellation.
_NOT_IN_FP16 = {
    "hdim8_fp16-b1h2k1-q1k16",
    "hdim8_fp16_backward-b1h2k1-q1k16",
    "hdim64_fp16_window_backward-b1h2k1-q90k33-w0,0",
}


def in_fp16(cases: list[Case]) -> list[Case]:
    """The same rows in fp16, for cards without bf16."""
    rows = (replace(case, spec=case.spec.model_copy(update={"dtype": "fp16"})) for case in cases)
    return [case for id_, case in {case.id: case for case in rows}.items() if id_ not in _NOT_IN_FP16]


# What Turing's kernels run emulated: each feature, each way of padding, each tile; of each spec the largest small row.
TURING_SPECS = [
    "hdim8_fp16",
    "hdim64_fp16",
    "hdim72_fp16",
    "hdim128_fp16_causal",
    "hdim192_hdimv128_fp16_causal",
    "hdim256_fp16",
    "hdim8_hdimv256_fp16",
    "hdim40_hdimv104_fp16_causal",
    "hdim64_fp16_window",
    "hdim64_fp16_softcap",
    "hdim128_fp16_causal_alibi",
    "hdim64_fp16_dropout",
    "hdim64_fp16_causal_window_softcap_alibi_dropout",
    "hdim136_hdimv72_fp16_window_softcap_alibi_dropout",
    "hdim64_fp16_varlen",
    "hdim72_hdimv40_fp16_window_softcap_alibi_dropout_varlen",
    "hdim64_fp16_splitkv",
    "hdim128_fp16_causal_splitkv",
    "hdim72_hdimv40_fp16_window_softcap_splitkv",
    "hdim64_fp16_causal_alibi_dropout_splitkv",
    "hdim64_fp16_causal_paged_splitkv",
    "hdim72_hdimv40_fp16_softcap_paged_splitkv",
    "hdim128_fp16_window_alibi_varlen_paged",
]
TURING_GRADIENT_SPECS = [
    "hdim8_fp16_backward",
    "hdim40_fp16_backward",
    "hdim64_fp16_backward",
    "hdim128_fp16_causal_backward",
    "hdim192_fp16_backward",
    "hdim256_fp16_backward",
    "hdim8_hdimv256_fp16_backward",
    "hdim64_fp16_window_backward",
    "hdim64_fp16_softcap_backward",
    "hdim128_fp16_causal_alibi_backward",
    "hdim256_fp16_dropout_backward",
    "hdim64_fp16_causal_window_softcap_alibi_dropout_backward",
    "hdim72_hdimv40_fp16_window_softcap_alibi_dropout_varlen_backward",
    "hdim72_fp16_backward_deterministic",
    "hdim256_fp16_causal_backward_deterministic",
    "hdim64_fp16_causal_varlen_backward_deterministic",
    "hdim40_hdimv72_fp16_window_softcap_alibi_dropout_backward_deterministic",
]
# What Hopper's backward runs emulated where that is not the default: each feature, each way of padding, each tile.
HOPPER_GRADIENT_SPECS = [
    "hdim8_bf16_backward",
    "hdim40_fp16_backward",
    "hdim64_bf16_backward",
    "hdim72_bf16_backward",
    "hdim128_bf16_backward",
    "hdim128_fp16_causal_backward",
    "hdim192_fp16_backward",
    "hdim256_bf16_causal_backward",
    "hdim8_hdimv256_fp16_backward",
    "hdim192_hdimv128_bf16_causal_backward",
    "hdim64_bf16_causal_backward",
    "hdim64_bf16_window_backward",
    "hdim64_bf16_softcap_backward",
    "hdim128_fp16_causal_window_backward",
    "hdim128_fp16_causal_alibi_backward",
    "hdim256_bf16_dropout_backward",
    "hdim64_bf16_bias_backward",
    "hdim256_bf16_causal_bias_backward",
    "hdim136_fp16_softcap_bias_dropout_backward",
    "hdim72_hdimv40_fp16_window_softcap_alibi_bias_dropout_backward",
    "hdim64_bf16_causal_sink_backward",
    "hdim64_bf16_causal_window_softcap_alibi_dropout_backward",
    "hdim136_hdimv72_fp16_window_softcap_alibi_dropout_backward",
    "hdim64_bf16_varlen_backward",
    "hdim72_hdimv40_bf16_window_softcap_alibi_dropout_varlen_backward",
    "hdim72_hdimv40_fp16_causal_sink_varlen_backward",
    "hdim64_bf16_causal_backward_deterministic",
    "hdim64_bf16_causal_bias_backward_deterministic",
    "hdim72_fp16_backward_deterministic",
    "hdim64_hdimv128_bf16_backward_deterministic",
    "hdim256_bf16_causal_backward_deterministic",
    "hdim40_hdimv72_bf16_window_softcap_alibi_dropout_backward_deterministic",
    "hdim64_bf16_causal_varlen_backward_deterministic",
]


def of_specs(cases: list[Case], slugs: list[str]) -> list[Case]:
    """The small rows of the specs that the slugs name."""
    found = [case for case in cases if not case.large and case.spec.slug in slugs]
    assert {case.spec.slug for case in found} == set(slugs)
    return found


def largest(cases: list[Case], slugs: list[str]) -> list[Case]:
    """The largest of the small rows of each of the specs that the slugs name."""
    rows = sorted(cases, key=lambda case: case.batch * case.seqlen_q * case.seqlen_k)
    found = {case.spec.slug: case for case in rows if not case.large}
    return [found[slug] for slug in slugs]


def specs(cases: list[Case] = CASES) -> Iterator[AttentionSpec]:
    """The distinct specs, in order of first use: what has to be compiled."""
    return iter(dict.fromkeys(case.spec for case in cases))
