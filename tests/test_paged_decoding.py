"""Whole models of transformers that decode with a paged cache: a packed prompt, then token by token, beside eager."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import fagen

pytest.importorskip("transformers")

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, CacheLayerMixin

PAGE = 16
LENGTHS = [20, 13, 5]  # of the prompts, padded on the left to the longest
PROMPT, NEW = max(LENGTHS), 64
VOCABULARY = 16
# What models call the argument that holds a cache, by version.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # nothing ends a text


class PagedLayer(CacheLayerMixin):
    """One layer's pages of keys and values, NaN until they are written, and how many keys each entry has."""

    is_sliding = False  # all keys stay, a window leaves them out

    def __init__(self, config: Any, table: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (int(table.max()) + 3, PAGE, config.num_key_value_heads, head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype, device=table.device) for _ in range(2))
        self.table = table
        self.used = torch.zeros(len(table), dtype=torch.int32, device=table.device)
        self.columns = 0  # of input_ids so far, padding included
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Done when it is made."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Leaves the new keys to `attend`, which has the mask that says which of them are padding."""
        self.columns += key_states.shape[2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        # Older versions pass the positions of the queries.
        queries = len(query_length) if isinstance(query_length, Tensor) and query_length.dim() else int(query_length)
        return self.columns + queries, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # as older versions have it

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, call: dict[str, Any]) -> Tensor:
        """Attention of new queries (B, S, Hq, D) to the pages and the new keys, which go there. mask (B, columns)."""
        if q.shape[1] == 1:
            o: Tensor = fagen.flash_attn_with_kvcache(
                *(q, self.keys, self.values, k, v), cache_seqlens=self.used, block_table=self.table, **call
            )
            self.used += 1
            return o
        valid = mask.bool()
        lengths = valid.sum(1, dtype=torch.int32)
        begins = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        o = q.new_zeros(q.shape)
        rows = q[valid], k[valid], v[valid]
        o[valid] = fagen.flash_attn_varlen_func(*rows, begins, begins, q.shape[1], q.shape[1], **call)
        entries, places = valid.nonzero()[:, 0], (valid.cumsum(1) - 1)[valid]
        pages = self.table.long()[entries, places // PAGE]
        self.keys[pages, places % PAGE], self.values[pages, places % PAGE] = rows[1:]
        self.used += lengths
        return o


class PagedCache(Cache):
    """Pages in random order, which the layers lay out alike. Entries of block_table past the last token name none."""

    def __init__(self, config: Any, dtype: torch.dtype, device: str) -> None:
        needed = [-(-(length + NEW) // PAGE) for length in LENGTHS]
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).int()
        table = torch.zeros(len(LENGTHS), max(needed) + 1, dtype=torch.int32)
        for row, pages in zip(table, order.split(needed), strict=True):
            row[: len(pages)] = pages
        table = table.to(device)
        super().__init__(layers=[PagedLayer(config, table, dtype) for _ in range(config.num_hidden_layers)])


@dataclass
class Implementation:
    """The attention of the model whose cache this is."""

    cache: PagedCache
    decoded: int = 0  # calls of one query an entry

    def mask(self, *, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        return attention_mask

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        layer = self.cache.layers[int(module.layer_idx)]  # type: ignore[arg-type]
        self.decoded += query.shape[2] == 1
        call = {
            "softmax_scale": scaling,
            "causal": True,
            "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            "softcap": softcap or 0.0,
        }
        return layer.attend(*(x.transpose(1, 2) for x in (query, key, value)), attention_mask, call), None


def llama() -> Any:
    return LlamaForCausalLM, LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        **SPECIAL,
    )


def gemma2() -> Any:
    return Gemma2ForCausalLM, Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.1,
        **SPECIAL,
    )


def texts() -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask (3, 84), random. Of 16 tokens none says what comes next: what is before it does."""
    tokens = torch.randint(2, VOCABULARY, (len(LENGTHS), PROMPT + NEW), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    for row, length in zip(mask, LENGTHS, strict=True):
        row[: PROMPT - length] = 0
    return tokens, mask


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For tensors this small threads cost more than they save, and on a busy machine a hundred times that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[llama, gemma2])
def taught(one_thread: None, request: pytest.FixtureRequest) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    """A random model, whose logits would be close to ties, after steps enough to know the texts by heart: its weights,
    rounded to bfloat16."""
    make = request.param
    kind, config = make()
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = kind(config).train()
        tokens, mask = texts()
        labels = tokens.clone()
        labels[:, :PROMPT] = -100
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
        for _ in range(100):
            out = network(input_ids=tokens, attention_mask=mask, position_ids=positions, labels=labels, use_cache=False)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
    return make, {name: x.bfloat16() for name, x in network.state_dict().items()}


def built(
    taught: tuple[Callable[[], Any], dict[str, Tensor]], implementation: str, dtype: torch.dtype, device: str
) -> PreTrainedModel:
    make, weights = taught
    kind, config = make()
    config._attn_implementation = implementation
    network: PreTrainedModel = kind(config)
    network.load_state_dict(weights)
    return network.to(device, dtype).eval()


def decoded(network: PreTrainedModel, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
    """The tokens (3, 64) that transformers generates greedily, and their logits (3, 64, vocabulary)."""
    tokens, mask = (x[:, :PROMPT].to(network.device) for x in texts())
    out = network.generate(
        input_ids=tokens,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
        **({} if cache is None else {CACHE: cache}),
    )
    return out.sequences[:, PROMPT:].cpu(), torch.stack(out.logits, 1).double().cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_tokens(taught: tuple[Callable[[], Any], dict[str, Tensor]], device: str, dtype: torch.dtype) -> None:
    """64 tokens of three prompts of different lengths: those of eager, by logits as near to float32 as eager's."""
    paged = built(taught, "eager", dtype, device)
    cache = PagedCache(paged.config, dtype, device)
    implementation = Implementation(cache)
    AttentionInterface.register("fagen-with-pages", implementation.attention)
    AttentionMaskInterface.register("fagen-with-pages", implementation.mask)
    paged.set_attn_implementation("fagen-with-pages")
    expected, logits = decoded(built(taught, "eager", torch.float32, device))
    eager, eager_logits = decoded(built(taught, "eager", dtype, device))
    tokens, paged_logits = decoded(paged, cache)

    assert implementation.decoded == (NEW - 1) * len(cache.layers)
    assert torch.equal(cache.layers[0].used.cpu(), torch.tensor(LENGTHS, dtype=torch.int32) + NEW - 1)
    assert torch.equal(tokens, eager) and torch.equal(tokens, expected)
    # No luck: what the types lose is far from what would change a token.
    best, second = eager_logits.topk(2).values.unbind(2)
    assert (best - second).min() > 4 * (paged_logits - eager_logits).abs().max()
    assert (paged_logits - logits).norm() <= 1.2 * (eager_logits - logits).norm()
