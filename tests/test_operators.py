"""Gradients through `fagen.load`, and what torch.library, torch.compile, autocast and CUDA graphs make of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fagen
from fagen import kernels, operators, ops, prepared, reference
from fagen.call import DTYPES
from fagen.errors import SpecError
from fagen.spec import AttentionSpec

GRADIENT_BUDGET = 1e-2  # SEMANTICS, for bf16
CAUSAL = AttentionSpec(head_dim=16, causal=True, backward=True)
FULL = AttentionSpec(
    head_dim=16, head_dim_v=24, window=True, softcap=True, alibi=True, dropout=True, backward=True, deterministic=True
)
TRAINING = AttentionSpec(head_dim=16, causal=True, softcap=True, dropout=True, backward=True)
BIASED = AttentionSpec(head_dim=16, softcap=True, bias=True, sink=True, backward=True)
FORWARD = AttentionSpec(head_dim=16)
VALUES: dict[AttentionSpec, dict[str, Any]] = {
    CAUSAL: {},
    FULL: {
        "window": (9, 5),
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.25, 0.5]),
        "dropout_p": 0.2,
        "seed": 1,
        "softmax_scale": 0.3,
    },
    TRAINING: {"softcap": 5.0, "dropout_p": 0.2, "seed": 1},
    BIASED: {"softcap": 5.0, "sink": torch.tensor([0.5, 2.0]), "bias": torch.linspace(-2.0, 2.0, 27).expand(2, 20, 27)},
    FORWARD: {},
}


def load(spec: AttentionSpec) -> fagen.Attention:
    return fagen.load(spec, arch="sm80", emulate=True)


def tensors(
    spec: AttentionSpec,
    *,
    batch: int = 1,
    seqlen_q: int = 20,
    seqlen_k: int = 27,
    grad: bool = True,
    seed: int = 0,
    device: str = "cpu",
) -> list[Tensor]:
    """q, k, v of two heads over one: unit normal, in the spec's dtype."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((seqlen_q, 2, spec.head_dim), (seqlen_k, 1, spec.head_dim), (seqlen_k, 1, spec.dim_v))
    made = [torch.randn((batch, *size), generator=generator).to(DTYPES[spec.dtype]) for size in sizes]
    return [x.to(device).requires_grad_(grad) for x in made]


def expected(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor | None,
    d_lse: Tensor | None,
    **values: Any,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) by float64 autograd through the definition. An infinite lse takes no gradient."""
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, lse = reference.attention(*inputs, causal=spec.causal, **values)
    loss = torch.zeros((), dtype=torch.float64, device=q.device)
    if d_o is not None:
        loss = loss + (o * d_o.double()).sum()
    if d_lse is not None:
        loss = loss + torch.where(lse.isinf(), 0.0, lse * d_lse.double()).sum()
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def assert_close(actual: Sequence[Tensor | None], wanted: Sequence[Tensor], budget: float = GRADIENT_BUDGET) -> None:
    for name, one, other in zip(("dq", "dk", "dv"), actual, wanted, strict=True):
        assert one is not None and one.shape == other.shape and one.is_contiguous(), name
        norm = other.double().norm().item()
        error = (one.double() - other.double()).norm().item() / (norm or 1.0)
        assert error <= budget, f"{name}: {error:.1e}"


# Gradients


@pytest.mark.parametrize("spec", [CAUSAL, FULL, TRAINING], ids=lambda spec: spec.slug)
@pytest.mark.parametrize("used", ["o", "lse", "both"])
def test_gradients(spec: AttentionSpec, used: str) -> None:
    """Of o, of lse and of both, in two batches with rows that see nothing, everything poisoned before it is written."""
    inputs = tensors(spec, batch=2, seqlen_q=40, seqlen_k=33)
    o, lse = load(spec)(*inputs, return_lse=True, _poison=True, **VALUES[spec])
    d_o = torch.randn(o.shape, dtype=o.dtype) if used != "lse" else None
    d_lse = torch.randn(lse.shape) if used != "o" else None
    given = [(output, d) for output, d in ((o, d_o), (lse, d_lse)) if d is not None]
    actual = torch.autograd.grad([output for output, _ in given], inputs, [d for _, d in given])
    assert_close(actual, expected(spec, *inputs, d_o, d_lse, **VALUES[spec]))


@pytest.mark.parametrize("spec", [CAUSAL, FULL], ids=lambda spec: spec.slug)
def test_only_needed_gradients(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each subset of them is the same as all together, and no kernel runs that serves none of it."""
    attention = load(spec)
    launched: list[str] = []
    original = kernels.Launch.__call__

    def note(self: kernels.Launch, *given: Tensor | None) -> None:
        launched.append(self.kernel.plan.kind)
        original(self, *given)

    monkeypatch.setattr(kernels.Launch, "__call__", note)
    all_inputs = tensors(spec)
    d_o = torch.randn((1, 20, 2, spec.dim_v)).bfloat16()
    whole = torch.autograd.grad(attention(*all_inputs, **VALUES[spec]), all_inputs, d_o)
    for needed in itertools.product((False, True), repeat=3):
        if not any(needed):
            continue
        inputs = [x.detach().requires_grad_(need) for x, need in zip(all_inputs, needed, strict=True)]
        o = attention(*inputs, _poison=True, **VALUES[spec])
        launched.clear()
        o.backward(d_o)
        for x, need, gradient in zip(inputs, needed, whole, strict=True):
            assert (x.grad is None) if not need else torch.equal(x.grad, gradient)  # type: ignore[arg-type]
        assert ("bwd_delta" in launched) == (needed[0] or needed[1])
        if spec.deterministic:
            assert ("bwd_dq" in launched) == needed[0] and ("bwd" in launched) == (needed[1] or needed[2])
        else:
            assert ("bwd_convert" in launched) == needed[0] and "bwd" in launched


def strided(kind: str) -> tuple[list[Tensor], Tensor]:
    """q, k, v and do with the strides that `kind` names."""
    q, k, v = (x.detach() for x in tensors(CAUSAL, batch=2, seqlen_q=20, seqlen_k=20))
    d_o = torch.randn(2, 20, 2, 16).bfloat16()
    if kind == "transposed":
        q, k, v, d_o = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, d_o))
    elif kind == "packed":
        q, k, v = torch.randn(2, 20, 3, 2, 16).bfloat16().unbind(2)
    elif kind == "unaligned":
        q, k, v, d_o = (torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for x in (q, k, v, d_o))
        assert all(x.data_ptr() % 16 for x in (q, k, v, d_o))
    elif kind == "odd rows":
        q, k, v, d_o = (torch.cat([x, x[..., :1]], -1)[..., :-1] for x in (q, k, v, d_o))
    elif kind == "expanded":
        k, v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
        d_o = torch.ones((), dtype=torch.bfloat16).expand(2, 20, 2, 16)
    elif kind == "expanded do":
        d_o = d_o[:, :1].expand(-1, 20, -1, -1)
    elif kind == "last dimension apart":
        d_o = d_o.transpose(1, 3).contiguous().transpose(1, 3)
    else:
        raise AssertionError(kind)
    return [q, k, v], d_o


@pytest.mark.parametrize(
    "kind",
    ["transposed", "packed", "unaligned", "odd rows", "expanded", "expanded do", "last dimension apart"],
)
def test_strides(kind: str) -> None:
    """Gradients are those of contiguous clones, and contiguous."""
    attention = load(CAUSAL)
    inputs, d_o = strided(kind)
    results = []
    for made in (inputs, [x.clone(memory_format=torch.contiguous_format) for x in inputs]):
        leaves = [x.detach().requires_grad_() for x in made]
        o, lse = attention(*leaves, return_lse=True)
        d_lse = torch.ones(2, 20, 2).transpose(1, 2) if made is inputs else torch.ones(2, 2, 20)
        results.append(
            (o, lse, *torch.autograd.grad((o, lse), leaves, (d_o if made is inputs else d_o.clone(), d_lse)))
        )
    for actual, wanted in zip(*results, strict=True):
        assert torch.equal(actual, wanted) and actual.is_contiguous()


@pytest.mark.parametrize("spec", [CAUSAL, FULL], ids=lambda spec: spec.slug)
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 3, 0), (2, 0, 0)], ids=str)
def test_nothing_to_do(spec: AttentionSpec, sizes: tuple[int, int, int]) -> None:
    """B, Sq or Sk of 0: shapes as ever, and gradients of 0."""
    batch, seqlen_q, seqlen_k = sizes
    inputs = tensors(spec, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    o, lse = load(spec)(*inputs, return_lse=True, _poison=True, **VALUES[spec])
    assert o.shape == (batch, seqlen_q, 2, spec.dim_v) and not o.any() and (lse == -torch.inf).all()
    (o.float().sum() + torch.where(lse.isinf(), 0.0, lse).sum()).backward()
    for x in inputs:
        assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()


def test_no_gradient_then_one() -> None:
    """N27: a call under no_grad before leaves no trace in the gradients of the next."""
    attention = load(CAUSAL)
    inputs = tensors(CAUSAL)
    first = torch.autograd.grad(attention(*inputs).float().sum(), inputs)
    with torch.no_grad():
        assert not attention(*inputs).requires_grad
    with torch.inference_mode():
        attention(*inputs)
    assert not attention(*(x.detach() for x in inputs)).requires_grad
    again = torch.autograd.grad(attention(*inputs).float().sum(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_only_v_requires_a_gradient() -> None:
    q, k, v = tensors(CAUSAL)
    q, k = q.detach(), k.detach()
    o, _ = load(CAUSAL)(q, k, v, return_lse=True)
    o.sum().backward()
    assert v.grad is not None and q.grad is None and k.grad is None
    assert_close([v.grad] * 3, [expected(CAUSAL, q, k, v, torch.ones_like(o), None)[2]] * 3)


def test_double_backward_is_an_error() -> None:
    attention = load(CAUSAL)
    q, k, v = tensors(CAUSAL)
    wanted = torch.autograd.grad(attention(q, k, v).float().sum(), q)
    (gradient,) = torch.autograd.grad(attention(q, k, v).float().sum(), q, create_graph=True)
    assert torch.equal(gradient, wanted[0])
    with pytest.raises(SpecError, match="no second derivatives"):
        gradient.float().square().sum().backward()
    o = torch.ops.fagen.forward(q, k, v, *operator_arguments(CAUSAL))[0]
    (gradient,) = torch.autograd.grad(o.float().sum(), q, create_graph=True)
    with pytest.raises(SpecError, match="no second derivatives"):
        gradient.float().square().sum().backward()


def test_what_has_no_gradient() -> None:
    with pytest.raises(SpecError, match=r"AttentionSpec\(\.\.\., backward=True\)"):
        load(FORWARD)(*tensors(FORWARD))
    slopes = VALUES[FULL]["alibi_slopes"].clone().requires_grad_()
    with pytest.raises(SpecError, match=r"alibi_slopes requires a gradient.*pass alibi_slopes\.detach\(\)"):
        load(FULL)(*tensors(FULL), **(VALUES[FULL] | {"alibi_slopes": slopes}))
    with torch.no_grad():
        load(FULL)(*tensors(FULL), **(VALUES[FULL] | {"alibi_slopes": slopes}))
    with pytest.raises(NotImplementedError, match="forward mode"), torch.autograd.forward_ad.dual_level():
        q, k, v = tensors(CAUSAL, grad=False)
        load(CAUSAL)(torch.autograd.forward_ad.make_dual(q, q), k, v)
    for transform in (torch.vmap, torch.func.grad):
        with pytest.raises(SpecError, match=r"transforms of torch\.func"):
            transform(lambda q: load(CAUSAL)(q[None], k, v).float().sum())(q)


def test_memory_between_forward_and_backward() -> None:
    """Saved: the inputs and o as they are, statistics of 8 bytes a row, the state of the random numbers."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    q, k, v = tensors(TRAINING, seqlen_q=200)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = load(TRAINING)(q, k, v, **VALUES[TRAINING])
    inputs = {x.data_ptr() for x in (q, k, v, o)}
    rest = [x for x in saved if x.data_ptr() not in inputs]
    assert sorted(x.numel() * x.element_size() for x in rest) == [16, 1 * 2 * 256 * 8]


def test_hooks_on_saved_tensors() -> None:
    """Tensors that come back elsewhere, with other strides and unaligned, give the same gradients."""
    attention = load(FULL)
    inputs = tensors(FULL)
    wanted = torch.autograd.grad(attention(*inputs, **VALUES[FULL]).float().sum(), inputs)

    def moved(x: Tensor) -> Tensor:
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.dim() == 4 else x.clone()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, moved):
        o = attention(*inputs, **VALUES[FULL])
        assert all(map(torch.equal, torch.autograd.grad(o.float().sum(), inputs), wanted))
    values = {name: value for name, value in VALUES[FULL].items() if name != "seed"}

    def run(call: Callable[..., Any]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return torch.autograd.grad(call().float().sum(), inputs)

    from torch.utils.checkpoint import checkpoint

    again = run(lambda: checkpoint(lambda: attention(*inputs, **values), use_reentrant=False))
    assert all(map(torch.equal, again, run(lambda: attention(*inputs, **values))))


def test_seed_as_a_tensor() -> None:
    attention = load(TRAINING)
    inputs = tensors(TRAINING, grad=False)
    values = {"softcap": 5.0, "dropout_p": 0.5}
    o = attention(*inputs, seed=torch.tensor([7, 0]), **values)
    assert torch.equal(o, attention(*inputs, seed=7, **values))
    moved = attention(*inputs, seed=torch.tensor([7, 2**40 + 1]), **values)
    wanted, _ = reference.attention(*inputs, causal=True, seed=7, offset=2**40 + 1, **values)
    assert not torch.equal(o, moved)
    assert ((moved.double() - wanted).norm() / wanted.norm()).item() < 2.5e-3
    for bad in (torch.tensor([7]), torch.tensor([7, 0]).int(), torch.tensor([7, 0], device="meta")):
        with pytest.raises(SpecError, match=r"seed is a tensor .*expected \(seed, offset\), int64 \(2,\) on cpu"):
            attention(*inputs, seed=bad, **values)


def test_prepared_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "MOST", 3)
    monkeypatch.setattr(prepared, "MOST", 2)
    attention = load(CAUSAL)
    for seqlen in (*range(1, 6), 1):
        q, k, v = tensors(CAUSAL, seqlen_q=seqlen, seqlen_k=seqlen)
        for width in (16, 24, 32):
            d_o = torch.ones(1, seqlen, 2, width).bfloat16()[..., :16]
            assert_close(
                torch.autograd.grad(attention(q, k, v), (q, k, v), d_o)[2:] * 3,
                expected(CAUSAL, q, k, v, d_o, None)[2:] * 3,
            )
    assert len(attention._calls) <= 3
    assert all(len(call._backwards) <= 2 for call in attention._calls.values())


def test_threads() -> None:
    """One Attention, forward and backward from several threads at once."""
    attention = load(CAUSAL)
    cases = [tensors(CAUSAL, seqlen_q=5 + index, seed=index) for index in range(4)]
    wanted = [expected(CAUSAL, *inputs, torch.ones(inputs[0].shape), None) for inputs in cases]
    results: list[Any] = [None] * len(cases)

    def work(index: int) -> None:
        for _ in range(3):
            results[index] = torch.autograd.grad(attention(*cases[index]).float().sum(), cases[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for actual, other in zip(results, wanted, strict=True):
        assert_close(actual, other)


# Operators


def operator_arguments(spec: AttentionSpec, **values: Any) -> tuple[Any, ...]:
    """The arguments of `torch.ops.fagen.forward` after q, k and v."""
    mods = [values.get(mod.argument) for mod in spec.valued]
    given = [values.get(name) for name in ("softmax_scale", "window", "dropout_p")]
    state = torch.tensor([values["seed"], 0]) if spec.dropout else None
    return (
        spec.model_dump_json(),
        "sm80",
        *given,
        [mod for mod in mods if isinstance(mod, Tensor)],
        [mod for mod in mods if not isinstance(mod, Tensor)],
        [isinstance(mod, Tensor) for mod in mods],
        [],
        None,
        None,
        None,
        state,
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spec", [FORWARD, CAUSAL, FULL, BIASED], ids=lambda spec: spec.slug)
def test_opcheck(spec: AttentionSpec, transposed: bool) -> None:
    q, k, v = tensors(spec, grad=spec.backward)
    if transposed:
        q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(spec.backward)
    arguments = operator_arguments(spec, **VALUES[spec])
    torch.library.opcheck(torch.ops.fagen.forward, (q, k, v, *arguments))
    if spec.backward:
        q, k, v = q.detach(), k.detach(), v.detach()
        o, lse, stats = torch.ops.fagen.forward(q, k, v, *arguments)
        of_mods = [not mod.no_gradient(spec.deterministic) for mod in spec.valued if mod.argument != "softcap"]
        for needed, d_lse in (([True, True, True], torch.ones_like(lse)), ([False, False, True], None)):
            d_o = torch.ones_like(o)
            saved = (q, k, v, o, stats, lse if spec.sink else None)
            torch.library.opcheck(torch.ops.fagen.backward, (d_o, d_lse, *saved, *arguments, [*needed, *of_mods]))


def test_operators_are_what_eager_calls_are() -> None:
    attention = load(FULL)
    inputs = tensors(FULL)
    o, lse = attention(*inputs, return_lse=True, **VALUES[FULL])
    again = torch.ops.fagen.forward(*inputs, *operator_arguments(FULL, **VALUES[FULL]))
    assert torch.equal(again[0], o) and torch.equal(again[1], lse) and not again[2].requires_grad
    outputs = ((o, lse), again[:2])
    one, other = (torch.autograd.grad(pair, inputs, (torch.ones_like(o), torch.ones_like(lse))) for pair in outputs)
    assert all(map(torch.equal, one, other))
    with pytest.raises(SpecError, match="computes none"):
        torch.ops.fagen.forward(*tensors(FORWARD), *operator_arguments(FORWARD))


@pytest.fixture
def no_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a build")

    monkeypatch.setattr(kernels, "find_or_build", refuse)
    operators._attention.cache_clear()


def test_fake_and_meta_tensors_build_nothing(no_builds: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    attention = fagen.Attention(FULL)
    real = tensors(FULL, grad=False)
    values = {name: value for name, value in VALUES[FULL].items() if name not in ("seed", "alibi_slopes")}
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x).requires_grad_() for x in real]
        o, lse = attention(*inputs, alibi_slopes=torch.empty(2), return_lse=True, **values)
        assert o.shape == (1, 20, 2, 24) and lse.shape == (1, 2, 20) and lse.dtype == torch.float32
        (o.float().sum() + lse.sum()).backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)
        with pytest.raises(SpecError, match="v has head dim 8"):
            attention(*inputs[:2], inputs[2][..., :8], alibi_slopes=torch.empty(2), **values)
    o = attention(*(x.to("meta") for x in real), alibi_slopes=torch.empty(2, device="meta"), **values)
    assert o.device.type == "meta" and o.shape == (1, 20, 2, 24)


class Block(nn.Module):
    """A transformer block of two heads around a callable attention."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor, seed: int | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 16)).unbind(2)
        o, lse = self.attention(q, k, v, softcap=5.0, dropout_p=0.2, seed=seed, return_lse=True)
        x = x + self.out(o.flatten(2).to(x.dtype)) + 0.01 * lse.mean(1)[..., None].to(x.dtype)
        return x + self.mlp(x)


@pytest.fixture
def block() -> Iterator[Block]:
    torch.manual_seed(0)
    yield Block(load(TRAINING)).bfloat16()
    torch._dynamo.reset()


def step(module: Callable[..., Tensor], block: Block, *arguments: Any) -> list[Tensor]:
    """The output and the gradients of all parameters."""
    block.zero_grad()
    y = module(*arguments)
    y.float().square().mean().backward()
    return [y.detach(), *(parameter.grad for parameter in block.parameters() if parameter.grad is not None)]


def assert_same_step(actual: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(actual) == len(wanted) > 8
    for one, other in zip(actual, wanted, strict=True):
        assert (one.float() - other.float()).norm() <= 2e-2 * other.float().norm()


def test_compiled_block(block: Block) -> None:
    """Whole, forward and backward, for two lengths (the second dynamic), as eager; dropout draws anew each time."""
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for seqlen in (20, 33, 47):
        x = torch.randn(2, seqlen, 32).bfloat16()
        assert_same_step(step(compiled, block, x, 3), step(block, block, x, 3))
    with torch.no_grad():
        assert not torch.equal(compiled(x), compiled(x))


def test_compiled_block_through_inductor(block: Block) -> None:
    compiled = torch.compile(block, fullgraph=True)
    x = torch.randn(2, 20, 32).bfloat16()
    assert_same_step(step(compiled, block, x, 3), step(block, block, x, 3))


def test_compiled_errors() -> None:
    compiled = torch.compile(load(CAUSAL), fullgraph=True, backend="eager")
    q, k, v = tensors(CAUSAL, grad=False)
    with pytest.raises(Exception, match="v has head dim 8; the spec's is 16"):
        compiled(q, k, v[..., :8])
    with pytest.raises(Exception, match="softcap is given, but the spec lacks the feature"):
        compiled(q, k, v, softcap=3.0)


@pytest.mark.parametrize("compile", [False, True])
def test_autocast(compile: bool) -> None:
    """Inputs of any of its types become the spec's; gradients come back in the inputs' own."""
    attention: Any = load(CAUSAL)
    if compile:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = [x.detach().float().requires_grad_() for x in tensors(CAUSAL)]
    if not compile:
        with pytest.raises(SpecError, match=r"q has dtype torch\.float32"):
            attention(*inputs)
    with torch.autocast("cpu", dtype=torch.float16):  # whatever the type of autocast: the kernel has its own
        o = attention(*inputs)
        assert o.dtype == torch.bfloat16
    gradients = torch.autograd.grad(o.sum(), inputs)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert_close(gradients, expected(CAUSAL, *inputs, torch.ones_like(o), None))
    with torch.autocast("cpu", enabled=False), pytest.raises(Exception, match=r"q has dtype torch\.float32"):
        attention(*inputs)
    with torch.autocast("cpu"), pytest.raises(Exception, match=r"q has dtype torch\.float64"):
        attention(*(x.detach().double() for x in inputs))


def test_a_short_training_run() -> None:
    """Ten steps with softcap and dropout: the loss falls, and as it does by the definition in eager PyTorch."""

    def by_definition(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **values: Any) -> tuple[Tensor, Tensor]:
        o, lse = reference.attention(q, k, v, causal=True, **values)
        return o.to(q.dtype), lse.float()

    losses: list[list[float]] = []
    for attention in (load(TRAINING), by_definition):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 32), Block(attention), Block(attention), nn.Linear(32, 11))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = (torch.arange(25)[None] * torch.tensor([[1], [3]]) + torch.arange(2)[:, None]) % 11
        losses.append([])
        for seed in range(10):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = model[0](tokens[:, :-1])
                for layer in (1, 2):
                    x = model[layer](x, 2 * seed + layer)
                loss = nn.functional.cross_entropy(model[3](x).flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    ours, wanted = losses
    assert ours[-1] < 0.6 * ours[0]
    assert ours == pytest.approx(wanted, rel=0.03)


# On a card


def on_gpu(spec: AttentionSpec) -> tuple[fagen.Attention, list[Tensor], dict[str, Any]]:
    values = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in VALUES[spec].items()}
    return fagen.load(spec), tensors(spec, device="cuda"), values


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [CAUSAL, FULL, TRAINING], ids=lambda spec: spec.slug)
def test_gradients_on_gpu(spec: AttentionSpec) -> None:
    attention, inputs, values = on_gpu(spec)
    o, lse = attention(*inputs, return_lse=True, _poison=True, **values)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    actual = torch.autograd.grad((o, lse), inputs, (d_o, d_lse))
    assert_close(actual, expected(spec, *inputs, d_o, d_lse, **values))


@pytest.mark.gpu
def test_cuda_graph_draws_anew() -> None:
    """Captured forward and backward: each replay has another mask, right for the state that it left."""
    attention, inputs, values = on_gpu(TRAINING)
    values["dropout_p"] = 0.5
    del values["seed"]
    d_o = torch.ones_like(inputs[0])

    def work() -> tuple[Tensor, ...]:
        o = attention(*inputs, **values)
        return (o, *torch.autograd.grad(o, inputs, d_o))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append([x.clone() for x in outputs])
    assert not torch.equal(replays[0][0], replays[1][0]) and not torch.equal(replays[1][0], replays[2][0])
    # The same mask in the forward and in the backward: dV of ones is the sum of the dropped probabilities, and so is o.
    for o, _, _, dv in replays:
        assert torch.isfinite(o).all() and dv.float().sum().item() > 0
    # A fixed state may change between replays.
    state = torch.tensor([1, 0], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(*inputs, seed=state, **values)
    for seed in (5, 6):
        state[0] = seed
        graph.replay()
        assert torch.equal(o, attention(*inputs, seed=seed, **values))


@pytest.mark.gpu
def test_compiled_block_on_gpu() -> None:
    torch.manual_seed(0)
    block = Block(fagen.load(TRAINING)).bfloat16().cuda()
    compiled = torch.compile(block, fullgraph=True)
    x = torch.randn(2, 20, 32, device="cuda").bfloat16()
    assert_same_step(step(compiled, block, x, 3), step(block, block, x, 3))
    torch._dynamo.reset()


@pytest.mark.gpu
def test_current_stream_and_new_threads() -> None:
    """Work waits for its own stream, also from a thread that has not used CUDA before."""
    attention, inputs, _ = on_gpu(CAUSAL)
    wanted = attention(*inputs)
    results: list[Tensor] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            late = [torch.zeros_like(x) for x in inputs]
            torch.cuda._sleep(50_000_000)
            for x, y in zip(late, inputs, strict=True):
                x.copy_(y.detach())
            results.append(attention(*late))
        stream.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(results) == 1 and torch.equal(results[0], wanted)
    assert torch.equal(
        torch.autograd.grad(attention(*inputs).sum(), inputs[2])[0], torch.autograd.grad(wanted.sum(), inputs[2])[0]
    )


@pytest.mark.gpu
def test_autocast_on_gpu() -> None:
    attention, inputs, _ = on_gpu(CAUSAL)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = attention(*(x.float() for x in inputs))
    assert o.dtype == torch.bfloat16 and torch.equal(o, attention(*inputs))


@pytest.mark.gpu
def test_second_gpu() -> None:
    """N24: tensors on another device than the current one, forward and backward; the current one stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    attention, inputs, _ = on_gpu(CAUSAL)
    wanted = attention(*inputs)
    for device in ("cuda:1", "cuda:0"):
        moved = [x.detach().to(device).requires_grad_() for x in inputs]
        o = attention(*moved)
        gradients = torch.autograd.grad(o.sum(), moved)
        assert torch.cuda.current_device() == 0 and torch.equal(o.cpu(), wanted.cpu())
        assert_close(
            [x.cpu() for x in gradients], expected(CAUSAL, *(x.cpu() for x in moved), torch.ones(o.shape), None)
        )
