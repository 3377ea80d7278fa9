"""fagen inside Hugging Face transformers: patterns beside the library's own masks, whole models beside eager."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.check import OUTPUT_BUDGET
from fagen.errors import SpecError
from fagen.interface import flash_attn_func

pytest.importorskip("transformers")

from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    masking_utils,
)

from fagen.integrations import transformers as integration
from fagen.integrations.transformers import Pattern, Span

VOCABULARY = 64
# What models call the argument that holds a cache, by version.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("PyTorch would compute what a kernel can")

    monkeypatch.setattr(integration, "_fallback", refuse)


@pytest.fixture
def fallbacks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks of the calls that PyTorch computes."""
    masks: list[Tensor] = []
    original = integration._fallback

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *rest: Any) -> Tensor:
        masks.append(mask)
        return original(module, query, key, value, mask, *rest)

    monkeypatch.setattr(integration, "_fallback", note)
    return masks


# Masks: whatever `mask` makes of a request, `attention` computes what transformers' own mask says.


class Layer(torch.nn.Module):
    """What `attention` may look at of a module."""

    is_causal = True
    num_key_value_groups = 2


def request(
    function: Callable[..., Any], q_length: int, kv_length: int, offset: Any = None, **more: Any
) -> dict[str, Any]:
    """A request as transformers makes it; the queries stand at the last keys unless `offset` says where."""
    offset = kv_length - q_length if offset is None else offset
    where = {"q_length": q_length, "q_offset": offset, "device": "cpu"}
    if "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters:  # an older version
        where = {"cache_position": torch.arange(q_length) + offset}
    return {"batch_size": 3, "kv_length": kv_length, "kv_offset": 0, "mask_function": function, **where, **more}


def queries(asked: dict[str, Any]) -> int:
    """The number of queries of a request."""
    return len(asked["cache_position"]) if "cache_position" in asked else int(asked["q_length"])


def qkv(seqlen_q: int, seqlen_k: int, dim: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """query (3, 4, Sq, D), key and value (3, 2, Sk, D)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, seqlen_q, dim), (3, 2, seqlen_k, dim), (3, 2, seqlen_k, dim)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def by_mask(tensors: list[Tensor], visible: Tensor, softcap: float | None = None) -> Tensor:
    """Attention (B, Sq, Hq, D) in float64 under visible (B, 1, Sq, Sk); zero for rows that see nothing."""
    q, k, v = (x.double() for x in tensors)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~visible, -math.inf).softmax(3).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def padding(*runs: tuple[int, int], length: int) -> Tensor:
    """(B, length) bool: entry b is valid in its run."""
    mask = torch.zeros(len(runs), length, dtype=torch.bool)
    for row, (start, stop) in zip(mask, runs, strict=True):
        row[start:stop] = True
    return mask


def sliding(window: int) -> Callable[..., Any]:
    return masking_utils.sliding_window_causal_mask_function(window)


CAUSAL, FULL = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
LEFT = padding((0, 40), (7, 40), (39, 40), length=40)
RIGHT = padding((0, 40), (0, 33), (0, 1), length=40)
MIDDLE = padding((3, 22), (0, 0), (3, 22), length=40)
EXPRESSIBLE = {
    "causal": request(CAUSAL, 40, 40),
    "causal, decoding": request(CAUSAL, 1, 40),
    "causal, several tokens": request(CAUSAL, 9, 40),
    "sliding": request(sliding(6), 40, 40),
    "sliding, several tokens": request(sliding(6), 9, 40),
    "sliding, longer than the keys": request(sliding(100), 40, 40),
    "sliding cache": request(sliding(6), 4, 9, 20, kv_offset=15),
    "full": request(FULL, 40, 40),
    "full, other lengths": request(FULL, 24, 40, 0),
    "causal, left padding": request(CAUSAL, 40, 40, attention_mask=LEFT),
    "causal, right padding": request(CAUSAL, 40, 40, attention_mask=RIGHT),
    "causal, padding on both sides": request(CAUSAL, 40, 40, attention_mask=MIDDLE),
    "causal, decoding, left padding": request(CAUSAL, 1, 40, attention_mask=LEFT),
    "causal, several tokens, left padding": request(CAUSAL, 9, 40, attention_mask=LEFT),
    "sliding, left padding": request(sliding(6), 40, 40, attention_mask=LEFT),
    "sliding, right padding": request(sliding(6), 40, 40, attention_mask=RIGHT),
    "sliding cache, left padding": request(sliding(6), 4, 9, 31, kv_offset=26, attention_mask=LEFT[:, :35]),
    "full, padding": request(FULL, 24, 40, 0, attention_mask=MIDDLE),
    "full, mask shorter than the keys": request(FULL, 24, 40, 0, attention_mask=RIGHT[:, :36]),
    "no padding in the mask": request(CAUSAL, 40, 40, attention_mask=torch.ones(3, 40, dtype=torch.bool)),
}
if hasattr(masking_utils, "sliding_window_bidirectional_mask_function"):
    EXPRESSIBLE["sliding both ways"] = request(masking_utils.sliding_window_bidirectional_mask_function(5), 40, 40)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_patterns(no_fallback: None, name: str) -> None:
    asked = EXPRESSIBLE[name]
    pattern = integration.mask(**asked)
    assert isinstance(pattern, Pattern)
    tensors = qkv(queries(asked), asked["kv_length"])
    o, weights = integration.attention(Layer(), *tensors, pattern)
    visible = masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
    expected = by_mask(tensors, visible)
    assert weights is None and o.shape == expected.shape
    counted = ~(o == 0).all(3).all(2)  # rows of padding are left zero, whatever the tensor lets them see
    if asked.get("attention_mask") is None:
        assert counted.all()
    elif pattern.positional:
        stop = asked["kv_offset"] + asked["kv_length"]
        valid = torch.nn.functional.pad(asked["attention_mask"], (0, stop))[:, stop - queries(asked) : stop]
        assert torch.equal(counted, valid)
    else:
        assert torch.equal(counted, asked["attention_mask"].any(1, keepdim=True).expand_as(counted))
    error = (o.double() - expected)[counted].norm() / expected[counted].norm()
    assert error <= OUTPUT_BUDGET["bf16"]


PACKED = torch.tensor([[0] * 11 + [1] * 29, [0] * 40, [0] * 20 + [1] + [2] * 19])
POSITIONS = torch.stack([torch.cat([torch.arange(int(n)) for n in row.bincount()]) for row in PACKED])
REMAPS = hasattr(masking_utils, "remap_positions_for_packed_sequence")


def packed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The mask function that transformers makes of position_ids that start anew."""
    if REMAPS:
        function = masking_utils.remap_positions_for_packed_sequence(function, POSITIONS)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(PACKED))


@pytest.mark.parametrize("function", [CAUSAL, sliding(6)], ids=["causal", "sliding"])
def test_sequences_side_by_side(no_fallback: None, function: Callable[..., Any]) -> None:
    asked = request(packed(function), 40, 40)
    pattern = integration.mask(**asked)
    assert isinstance(pattern, Pattern) and pattern.spans is not None and len(pattern.spans) == 6
    tensors = qkv(40, 40)
    expected = by_mask(tensors, masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False))
    o, _ = integration.attention(Layer(), *tensors, pattern, cu_seq_lens_q=torch.tensor([0, 11, 40]))
    assert (o.double() - expected).norm() / expected.norm() <= OUTPUT_BUDGET["bf16"]


NOT_EXPRESSIBLE = {
    "holes": request(CAUSAL, 40, 40, attention_mask=LEFT & (torch.arange(40) != 20)),
    "queries amid the keys": request(CAUSAL, 9, 40, 5),
    "a static cache": request(CAUSAL, 9, 40, torch.tensor(20)),
    "chunks": request(masking_utils.chunked_causal_mask_function(7, torch.zeros(3, dtype=torch.long)), 40, 40),
    "an own overlay": request(
        masking_utils.or_masks(CAUSAL, lambda b, h, i, j: (i < 10) & (j < 10)), 40, 40, use_vmap=True
    ),
    "a lambda": request(lambda b, h, i, j: j <= i + 3, 40, 40),
    "two windows": request(masking_utils.and_masks(sliding(6), masking_utils.sliding_window_overlay(3)), 40, 40),
    "packed and padded": request(packed(CAUSAL), 40, 40, attention_mask=LEFT),
}
if REMAPS:
    other = masking_utils.remap_positions_for_packed_sequence(CAUSAL, POSITIONS)
    NOT_EXPRESSIBLE["other positions"] = request(other, 40, 40)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", NOT_EXPRESSIBLE)
def test_other_masks_stay_tensors(fallbacks: list[Tensor], name: str, softcap: float | None) -> None:
    asked = NOT_EXPRESSIBLE[name]
    visible = integration.mask(**asked)
    assert isinstance(visible, Tensor) and visible.dtype == torch.bool
    tensors = qkv(queries(asked), asked["kv_length"])
    expected = by_mask(tensors, masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False), softcap)
    o, _ = integration.attention(Layer(), *tensors, visible, softcap=softcap)
    assert len(fallbacks) == 1
    assert (o.double() - expected).norm() / expected.norm() <= 1e-2


def test_fallback_with_added_masks_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "_WARNED", set())
    tensors = qkv(9, 9)
    visible = torch.rand(3, 1, 9, 9) > 0.3
    added = torch.zeros(3, 1, 9, 9).masked_fill(~visible, -math.inf).bfloat16()
    for softcap in (None, 2.0, 2.0):
        o, _ = integration.attention(Layer(), *tensors, added, softcap=softcap)
        expected = by_mask(tensors, visible, softcap)
        assert (o.double() - expected).norm() / expected.norm() <= 1e-2
    assert [record.name for record in caplog.records] == ["fagen"]
    assert "PyTorch computes" in caplog.text


# Calls


def test_without_a_mask(no_fallback: None) -> None:
    """As a model means it that makes none: its own is_causal, or the call's; ambiguities are errors."""
    tensors = qkv(40, 40)
    causal = torch.ones(40, 40, dtype=torch.bool).tril().expand(3, 1, 40, 40)
    for arguments, visible in (({}, causal), ({"is_causal": False}, torch.ones_like(causal))):
        o, _ = integration.attention(Layer(), *tensors, None, **arguments)
        expected = by_mask(tensors, visible)
        assert (o.double() - expected).norm() / expected.norm() <= OUTPUT_BUDGET["bf16"]
    with pytest.raises(SpecError, match="at which of 40 keys the 9 queries stand"):
        integration.attention(Layer(), *qkv(9, 40), None)
    with pytest.raises(SpecError, match="sliding_window is given without a mask"):
        integration.attention(Layer(), *tensors, None, sliding_window=6)


def test_values_reach_the_kernel(no_fallback: None) -> None:
    q, k, v = tensors = qkv(40, 40)
    pattern = integration.mask(**request(CAUSAL, 40, 40))
    torch.manual_seed(1)
    o, _ = integration.attention(Layer(), *tensors, pattern, dropout=0.5, scaling=0.3, softcap=4.0)
    torch.manual_seed(1)
    direct = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(o, flash_attn_func(*direct, 0.5, 0.3, causal=True, softcap=4.0))


@pytest.mark.parametrize("form", ["pattern", "spans", "mask"])
def test_sinks(form: str) -> None:
    """As gpt-oss has them: one more column of scores, which is left out after the softmax."""
    tensors = qkv(20, 20)
    sinks = torch.tensor([0.5, -1.0, 2.0, 4.0], dtype=torch.bfloat16, requires_grad=True)
    visible = torch.ones(20, 20, dtype=torch.bool).tril().expand(3, 1, 20, 20).clone()
    mask: Pattern | Tensor = Pattern(causal=True)
    if form == "spans":
        mask = Pattern(causal=True, spans=(Span(0, 4, 20), Span(1, 0, 20), Span(2, 0, 20)))
        visible[0, :, :, :4] = False
    if form == "mask":
        visible[1, :, 7:, 3] = False
        mask = visible
    o, _ = integration.attention(Layer(), *tensors, mask, s_aux=sinks)
    q, k, v = (x.double() for x in tensors)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~visible, -math.inf)
    wanted = sinks.detach().double().requires_grad_()
    columns = torch.cat([scores, wanted.view(1, 4, 1, 1).expand(3, 4, 20, 1)], 3).softmax(3)[..., :-1]
    expected = (columns @ v).transpose(1, 2)
    torch.testing.assert_close(o.double(), expected, rtol=2e-2, atol=1e-2)
    (found,) = torch.autograd.grad(o.float().square().sum(), sinks)
    (gradient,) = torch.autograd.grad(expected.square().sum(), wanted)
    torch.testing.assert_close(found.double(), gradient, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["position_bias", "block_table", "head_mask"])
def test_what_no_kernel_has_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=rf"no kernel .*\({name}\)"):
        integration.attention(Layer(), *qkv(9, 9), Pattern(causal=True), **{name: torch.zeros(4)})


def test_other_errors() -> None:
    with pytest.raises(SpecError, match="the mask has 2 dimensions"):
        integration.attention(Layer(), *qkv(9, 9), torch.ones(3, 9))
    with pytest.raises(SpecError, match="cu_seq_lens_q names several sequences"):
        integration.attention(Layer(), *qkv(9, 9), Pattern(causal=True), cu_seq_lens_q=torch.tensor([0, 4, 9]))
    with pytest.raises(SpecError, match="float32; q, k and v must be float16 or bfloat16"):
        integration.attention(Layer(), *qkv(9, 9, dtype=torch.float32), Pattern(causal=True))


def test_nothing_is_left_of_a_batch_of_padding() -> None:
    spans = (Span(0, 0, 0), Span(1, 0, 0), Span(2, 3, 3))
    o, _ = integration.attention(Layer(), *qkv(9, 9), Pattern(causal=True, spans=spans))
    assert o.shape == (3, 9, 4, 16) and not o.any()


# Models: the error of fagen beside that of the eager implementation in the same type, both against eager in float32.

LENGTH = 40


def gemma2() -> Any:
    return Gemma2ForCausalLM, Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=50.0,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,  # so that attention is not nearly uniform
    )


def llama() -> Any:
    return LlamaForCausalLM, LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )


def model(make: Callable[[], Any], implementation: str, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The same weights for each implementation and type, rounded to bfloat16."""
    kind, config = make()
    config._attn_implementation = implementation
    torch.manual_seed(0)
    made: PreTrainedModel = kind(config).bfloat16().to(device, dtype).eval()
    return made


def tokens(device: str = "cpu") -> Tensor:
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)


def logits_and_gradients(network: PreTrainedModel, mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits at valid positions, and the gradients of a random functional of them."""
    device = str(network.device)
    logits = network(input_ids=tokens(device), attention_mask=mask, use_cache=False).logits
    valid = logits if mask is None else logits[mask.bool()]
    weights = torch.randn(valid.shape, generator=torch.Generator().manual_seed(2)).to(device)
    (valid.float() * weights).sum().backward()
    return valid.detach().double(), {name: p.grad.double() for name, p in network.named_parameters()}


def whole(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def relative(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).norm() / expected.norm())


MODELS = [
    *((make, side, torch.bfloat16, "cpu") for make in (gemma2, llama) for side in (None, "left", "right")),
    (llama, "left", torch.float16, "cpu"),
    (gemma2, "left", torch.float16, "cpu"),
    *(
        pytest.param(make, side, dtype, "cuda", marks=pytest.mark.gpu)
        for make in (gemma2, llama)
        for side in (None, "left", "right")
        for dtype in (torch.bfloat16, torch.float16)
    ),
]


@pytest.mark.parametrize(("make", "side", "dtype", "device"), MODELS)
def test_models(no_fallback: None, make: Callable[[], Any], side: str | None, dtype: torch.dtype, device: str) -> None:
    mask = None
    if side == "left":
        mask = padding((0, LENGTH), (7, LENGTH), (30, LENGTH), length=LENGTH).long().to(device)
    elif side == "right":
        mask = padding((0, LENGTH), (0, 33), (0, 10), length=LENGTH).long().to(device)
    expected, expected_gradients = logits_and_gradients(model(make, "eager", torch.float32, device), mask)
    eager, eager_gradients = logits_and_gradients(model(make, "eager", dtype, device), mask)
    logits, gradients = logits_and_gradients(model(make, "fagen", dtype, device), mask)
    assert relative(logits, expected) <= 1.2 * relative(eager, expected)
    everything = whole(expected_gradients)
    assert relative(whole(gradients), everything) <= 1.2 * relative(whole(eager_gradients), everything)
    for name, gradient in gradients.items():
        right = expected_gradients[name]
        # One parameter's error varies more than that of all: from 0.6 to 1.4 times eager's.
        assert relative(gradient, right) <= 2 * relative(eager_gradients[name], right), name


@pytest.mark.parametrize("make", [gemma2, llama])
def test_decoding_with_a_cache(no_fallback: None, make: Callable[[], Any]) -> None:
    """A prompt with left padding, then three tokens, then one: the logits of the whole in one pass."""
    mask = padding((0, LENGTH), (7, LENGTH), (25, LENGTH), length=LENGTH).long()
    reference, eager, network = (
        model(make, name, dtype)
        for name, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), ("fagen", torch.bfloat16))
    )
    with torch.no_grad():
        expected = reference(input_ids=tokens(), attention_mask=mask).logits[mask.bool()].double()
        in_one = eager(input_ids=tokens(), attention_mask=mask).logits[mask.bool()].double()
        cache = DynamicCache(config=network.config)
        pieces = []
        for start, stop in ((0, 36), (36, 39), (39, 40)):
            step = network(
                input_ids=tokens()[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=torch.arange(start, stop)[None],
                use_cache=True,
                **{CACHE: cache},
            )
            pieces.append(step.logits)
    made = torch.cat(pieces, 1)[mask.bool()].double()
    assert relative(made, expected) <= 1.2 * relative(in_one, expected)


def test_static_caches_fall_back(fallbacks: list[Tensor]) -> None:
    network = model(llama, "fagen", torch.bfloat16)
    with torch.no_grad():
        expected = network(input_ids=tokens()).logits[:, -1]
        assert not fallbacks
        cache = StaticCache(config=network.config, max_cache_len=64)
        network(input_ids=tokens()[:, :-1], use_cache=True, **{CACHE: cache})
        made = network(input_ids=tokens()[:, -1:], use_cache=True, **{CACHE: cache}).logits[:, -1]
    assert fallbacks and relative(made.double(), expected.double()) < 5e-2


def test_training_with_dropout(no_fallback: None) -> None:
    kind, config = llama()
    config.attention_dropout, config._attn_implementation = 0.5, "fagen"
    torch.manual_seed(0)
    network = kind(config).bfloat16().train()

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return network(input_ids=tokens(), labels=tokens()).loss

    first, again, other = loss(1), loss(1), loss(2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    first.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert torch.equal(network.eval()(input_ids=tokens()).logits, network(input_ids=tokens()).logits)


def test_compiled(no_fallback: None) -> None:
    """Masks are made between graphs, and what one call saw of padding does not stay for the next."""
    network = model(llama, "fagen", torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(network, backend="eager")
    with torch.no_grad():
        for start in (0, 7, 30, 12):
            mask = padding((0, LENGTH), (start, LENGTH), (start, LENGTH), length=LENGTH).long()
            made, expected = (
                net(input_ids=tokens(), attention_mask=mask, use_cache=False).logits for net in (compiled, network)
            )
            assert torch.equal(made, expected)


def test_a_model_by_name_of_the_implementation() -> None:
    """The name passes the library's own validation, from a configuration and on a model that exists."""
    kind, config = llama()
    network = kind._from_config(config, attn_implementation="fagen", dtype=torch.bfloat16)
    assert network.config._attn_implementation == "fagen"
    network.set_attn_implementation("eager")
    network.set_attn_implementation("fagen")
    assert network.config._attn_implementation == "fagen"
