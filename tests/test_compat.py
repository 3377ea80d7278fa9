"""`fagen.compat.flash_attn` in the place of the `flash_attn` package."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

import fagen
from fagen import interface
from fagen.compat import flash_attn
from fagen.compat.flash_attn import bert_padding, flash_attn_interface
from fagen.errors import SpecError

# What flash-attention's own test of these functions imports.
IMPORTS = """
import fagen.compat.flash_attn
fagen.compat.flash_attn.install()
import flash_attn
import flash_attn.bert_padding
from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import USE_TRITON_ROCM, _get_block_size_n
from flash_attn.flash_attn_interface import flash_attn_func as again
from flash_attn.layers.rotary import apply_rotary_emb
import importlib.util
assert flash_attn is fagen.compat.flash_attn and flash_attn.bert_padding is fagen.compat.flash_attn.bert_padding
assert again is flash_attn_func and importlib.util.find_spec("flash_attn") is not None
assert tuple(int(part) for part in flash_attn.__version__.split(".")) >= (2, 7, 0)
fagen.compat.flash_attn.install()
"""


def test_install() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_install_does_not_displace_another(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("flash_attn")
    other.__file__ = "site-packages/flash_attn/__init__.py"
    monkeypatch.setitem(sys.modules, "flash_attn", other)
    with pytest.raises(SpecError, match=r"imported already, from site-packages/flash_attn/__init__\.py"):
        flash_attn.install()
    assert sys.modules["flash_attn"] is other


def test_without_install() -> None:
    module = importlib.import_module("fagen.compat.flash_attn")
    for name in interface.__all__:
        assert getattr(module, name) is getattr(interface, name) is getattr(flash_attn_interface, name)
    assert fagen.compat.flash_attn is module


def test_rotary_embeddings_are_refused() -> None:
    from fagen.compat.flash_attn.layers.rotary import apply_rotary_emb

    with pytest.raises(SpecError, match="apply_rotary_emb is not served"):
        apply_rotary_emb(torch.zeros(1))


# bert_padding

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])


def test_unpad_and_pad() -> None:
    x = torch.arange(24.0).view(3, 4, 2).requires_grad_()
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK)
    assert indices.tolist() == [0, 1, 9, 10, 11] and torch.equal(tokens, x.view(12, 2)[indices])
    assert cu_seqlens.tolist() == [0, 2, 2, 5] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and used.tolist() == [2, 0, 3] and used.dtype == torch.int32
    padded = bert_padding.pad_input(tokens, indices, 3, 4)
    assert torch.equal(padded, x * MASK[:, :, None])
    weights = torch.rand(3, 4, 2)
    assert torch.equal(torch.autograd.grad((padded * weights).sum(), x)[0], weights * MASK[:, :, None])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_unpad_with_space_that_is_not_used(dtype: torch.dtype) -> None:
    unused = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    x = torch.arange(12.0).view(3, 4)
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK.to(dtype), unused.to(dtype))
    assert tokens.tolist() == [0, 1, 2, 4, 9, 10, 11] == indices.tolist()
    assert cu_seqlens.tolist() == [0, 3, 4, 7] and longest == 3 and used.tolist() == [2, 0, 3]


def test_unpad_of_concatenated_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.arange(18.0).view(3, 6)
    tokens, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)] == tokens.tolist()
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6


def test_index_first_axis() -> None:
    x: Any = torch.arange(12.0).view(4, 3).requires_grad_()
    indices = torch.tensor([2, 0])
    rows = bert_padding.index_first_axis(x, indices)
    assert torch.equal(rows, x[indices])
    assert torch.equal(torch.autograd.grad(rows.sum(), x)[0], torch.tensor([[1.0], [0], [1], [0]]).expand(4, 3))
    assert torch.equal(bert_padding.index_put_first_axis(rows, indices, 4), x * torch.tensor([[1.0], [0], [1], [0]]))
