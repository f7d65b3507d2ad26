"""Rotary embeddings against float64 and against the functions of transformers, on both backends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slothplug.exactness import OP_DRAWS, assert_as_exact
from slothplug.kernels.backend import Backend
from slothplug.kernels.rotary import primitives, rotary, rotation_of
from tests.kernels.strided import strided

Tensors = dict[str, torch.Tensor]


class Variant(NamedTuple):
    """A family of models: its stock function, our options for it, and how it lays out its tables."""

    module: str
    options: dict[str, Any]
    function: str = "apply_rotary_pos_emb"
    table: str = "cat"
    partial: bool = False
    one_tensor: bool = False


INTERLEAVED = {"pairing": "interleaved"}
VARIANTS = {
    "llama": Variant("llama", {}),
    "olmo2": Variant("olmo2", {"promote": False}),
    "gpt_neox": Variant("gpt_neox", {}, partial=True),
    "phi": Variant("phi", {}, partial=False),
    "phi3": Variant("phi3", {}, partial=True),
    "gpt_oss": Variant("gpt_oss", {"table": "single"}, table="single"),
    "gemma4": Variant("gemma4", {}, one_tensor=True),
    "glm": Variant("glm", INTERLEAVED, partial=True),
    "ernie4_5": Variant("ernie4_5", INTERLEAVED | {"promote": False}),
    "cohere": Variant("cohere", INTERLEAVED | {"table": "repeat", "promote": False}, table="repeat"),
    "glm4v": Variant("glm4v", INTERLEAVED | {"table": "repeat"}, table="repeat", partial=True),
    "deepseek_v3": Variant("deepseek_v3", INTERLEAVED | {"output": "half"}, function="apply_rotary_pos_emb_interleave"),
    "deepseek_v3 of transformers 4": Variant(
        "deepseek_v3",
        INTERLEAVED | {"output": "half", "table": "halves"},
        function="apply_rotary_pos_emb_interleave",
    ),
    "deepseek_v4": Variant(
        "deepseek_v4",
        INTERLEAVED | {"table": "single", "rotate_last": True, "promote": False},
        table="single",
        partial=True,
        one_tensor=True,
    ),
}


def stock_of(variant: Variant) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    module = importlib.import_module(f"transformers.models.{variant.module}.modeling_{variant.module}")
    function = getattr(module, variant.function)
    if variant.one_tensor:
        return lambda q, k, cos, sin: (function(q, cos, sin), function(k, cos, sin))
    return function


def oracle(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pairing: str = "half",
    output: str = "same",
    table: str = "cat",
    rotate_last: bool = False,
    **_: Any,
) -> torch.Tensor:
    """The rotation written out, one pair after the other, in float64."""
    half = cos.shape[-1] if table == "single" else cos.shape[-1] // 2
    start = x.shape[-1] - 2 * half if rotate_last else 0
    out = list(x.unbind(-1))
    for p in range(half):
        first, second = (p, p + half) if pairing == "half" else (2 * p, 2 * p + 1)
        entries = {
            "single": (p, p),
            "repeat": (2 * p, 2 * p + 1),
            "halves": (p, p + half),
            "cat": (p, p + half) if pairing == "half" else (p, p),
        }[table]
        (c0, c1), (s0, s1) = ([t[:, None, :, i] for i in entries] for t in (cos, sin))
        x0, x1 = x[..., start + first], x[..., start + second]
        to_first, to_second = (p, p + half) if output == "half" else (first, second)
        out[start + to_first] = x0 * c0 - x1 * s0
        out[start + to_second] = x1 * c1 + x0 * s1
    return torch.stack(out, -1)


def tables(positions: torch.Tensor, width: int, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, T, width] (half of it for "single") at ``positions`` [B, T]."""
    angles = positions[..., None].double() * 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.double) / width)
    if layout == "cat":
        angles = torch.cat((angles, angles), -1)
    if layout == "repeat":
        angles = angles.repeat_interleave(2, -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def heads(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[B, H, T, D] as attention has it, a view of [B, T, H, D]; rows of root mean square 1e-3, 1 and 1e3."""
    batch, count, tokens, dim = shape
    sizes = 10.0 ** (3 * torch.randint(-1, 2, (batch, tokens, count, 1)))
    return (torch.randn(batch, tokens, count, dim) * sizes).to(dtype).transpose(1, 2)


def with_gradients(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    g: tuple[torch.Tensor, torch.Tensor],
) -> Tensors:
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    outputs = function(q, k)
    torch.autograd.backward(outputs, [a.to(y.dtype) for a, y in zip(g, outputs, strict=True)])
    return {"q": outputs[0], "k": outputs[1], "dq": q.grad, "dk": k.grad}


def exactly(cos: torch.Tensor, sin: torch.Tensor, options: dict[str, Any]) -> Callable[..., Any]:
    return lambda q, k: tuple(oracle(x, cos.double(), sin.double(), **options) for x in (q, k))


@pytest.mark.parametrize("name", VARIANTS)
def test_as_exact_as_stock(name: str, backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    variant = VARIANTS[name]
    stock_function = stock_of(variant)
    width, dim = (12, 20) if variant.partial else (16, 16)
    # Interpreted, a token takes a twentieth of a second: one a row there, and fewer draws.
    interpreted = (backend, device.type) == ("triton", "cpu")
    draws, tokens = (3, 1) if interpreted else (OP_DRAWS, 2)

    def draw(seed: int) -> tuple[Tensors, Tensors, Tensors]:
        torch.manual_seed(seed)
        q, k = (heads((2, count, tokens, dim), dtype).to(device) for count in (8, 2))
        # Exact in every dtype, so that the oracle and stock are given the same gradient.
        g = tuple(torch.randn(x.shape).bfloat16().to(device) for x in (q, k))
        table_dtype = dtype if seed % 2 else torch.float32
        if not variant.options.get("promote", True):
            table_dtype = torch.float32
        elif table_dtype is torch.float32:
            g = tuple(x.float() for x in g)
        cos, sin = (t.to(device) for t in tables(torch.randint(0, 200, (2, tokens)), width, variant.table, table_dtype))
        ours = with_gradients(lambda q, k: rotary(q, k, cos, sin, backend=backend, **variant.options), q, k, g)
        stock = with_gradients(lambda q, k: stock_function(q, k, cos, sin), q, k, g)
        exact = with_gradients(exactly(cos, sin, variant.options), q.double(), k.double(), g)
        assert [ours[name].dtype for name in ours] == [stock[name].dtype for name in ours]
        return ours, stock, exact

    # Two pools, as the tables' dtype decides that of the outputs.
    assert_as_exact(draw, range(0, 2 * draws, 2), f"{name} {backend}, float32 tables")
    if dtype is not torch.float32 and variant.options.get("promote", True):
        assert_as_exact(draw, range(1, 2 * draws, 2), f"{name} {backend}, tables of the input's dtype")


@pytest.mark.parametrize("rotate_last", [False, True])
@pytest.mark.parametrize(("dim", "width"), [(80, 20), (128, 32), (96, 96), (6, 2)])
def test_partial_rotation(
    dim: int, width: int, rotate_last: bool, backend: Backend, dtype: torch.dtype, device: torch.device
) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/1451: a kernel that took the whole head to rotate.

    The pairs are rotary / 2 apart, at positions far from 0 too, and the other dimensions keep their bits.
    """
    torch.manual_seed(0)
    positions = torch.tensor([[0, 1, 63, 200]])
    q, k = (heads((1, count, 4, dim), dtype).to(device) for count in (3, 1))
    cos, sin = (t.to(device) for t in tables(positions, width, "cat", dtype))
    outputs = rotary(q, k, cos, sin, rotate_last=rotate_last, backend=backend)
    rest = slice(0, dim - width) if rotate_last else slice(width, dim)
    rotated = slice(dim - width, dim) if rotate_last else slice(0, width)
    for x, y in zip((q, k), outputs, strict=True):
        assert torch.equal(x[..., rest], y[..., rest])
        exact = oracle(x.double(), cos.double(), sin.double(), rotate_last=rotate_last).to(dtype)
        # x0 c0 - x1 s0 may cancel: relative to the row.
        error = (y - exact)[..., rotated].double().abs().amax(-1) / x.double().abs().amax(-1)
        assert error.max() <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("layout", "form"),
    [("cat", "own"), ("repeat", "own"), ("single", "own"), ("cat", "shared"), ("cat", "expanded")],
)
def test_a_table_for_each_row_of_the_batch(layout: str, form: str, backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/477: position_ids that differ by row were read as shared."""
    torch.manual_seed(0)
    packed, padded = [0, 1, 2, 0], [1, 1, 0, 1]
    positions = torch.tensor([packed, padded, [100, 101, 102, 103]])
    if form != "own":
        positions = positions[2:]
    options = {"pairing": "half" if layout == "cat" else "interleaved", "table": layout}
    cos, sin = (t.to(device) for t in tables(positions, 8, layout, torch.float32))
    q, k = (torch.randn(3, 4, count, 8, device=device).transpose(1, 2) for count in (2, 1))
    g = tuple(torch.randn_like(x) for x in (q, k))
    exact = with_gradients(exactly(cos, sin, options), q.double(), k.double(), g)
    if form == "expanded":
        cos, sin = cos.expand(3, -1, -1), sin.expand(3, -1, -1)
    ours = with_gradients(lambda q, k: rotary(q, k, cos, sin, backend=backend, **options), q, k, g)
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


OPTIONS = [
    {"pairing": pairing, "output": output, "table": table}
    for pairing in ("half", "interleaved")
    for output in ("same", "half")
    for table in ("cat", "repeat", "single", "halves")
    if pairing == "interleaved" or table in ("cat", "single")
]


@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_any_strides_and_any_linear_map(data: st.DataObject) -> None:
    """Tables of any numbers: a pair's two entries differ, and backward is the transposed map, not the angle negated."""
    draw = data.draw
    options = draw(st.sampled_from(OPTIONS)) | {"rotate_last": draw(st.booleans())}
    batch, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    half, rest = draw(st.integers(1, 9)), draw(st.integers(0, 5))
    torch.manual_seed(draw(st.integers(0, 99)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(batch, draw(st.integers(1, 5)), tokens, 2 * half + rest) for _ in range(2)]
    q, k = (draw(strided(shape)).to(device) for shape in shapes)
    g = tuple(draw(strided(shape)).to(device) for shape in shapes)
    table_shape = (draw(st.sampled_from([1, batch])), tokens, half if options["table"] == "single" else 2 * half)
    cos, sin = draw(strided(table_shape)).to(device), draw(strided(table_shape)).to(device)
    exact = with_gradients(exactly(cos, sin, options), q.double(), k.double(), g)
    for backend in ("torch", "triton"):
        ours = with_gradients(lambda q, k, b=backend: rotary(q, k, cos, sin, backend=b, **options), q, k, g)
        for name, value in ours.items():
            torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_destinations_of_any_strides(data: st.DataObject) -> None:
    """Without autograd: q and k rotated, and gradients rotated back, into parts of larger buffers."""
    draw = data.draw
    options = draw(st.sampled_from(OPTIONS)) | {"rotate_last": draw(st.booleans())}
    half, rest, tokens = draw(st.integers(1, 5)), draw(st.integers(0, 3)), draw(st.integers(1, 2))
    torch.manual_seed(draw(st.integers(0, 99)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(2, draw(st.integers(1, 3)), tokens, 2 * half + rest) for _ in range(draw(st.integers(1, 2)))]
    inputs = [draw(strided(shape)).to(device) for shape in shapes]
    cos, sin = torch.randn(2, 2, tokens, half if options["table"] == "single" else 2 * half).to(device)
    rotation = rotation_of(shapes[0][-1], cos.shape[-1], **options)
    for backend in ("torch", "triton"):
        outputs = [draw(strided(shape, expanded=False)).to(device) for shape in shapes]
        primitives(backend).rotate(list(zip(inputs, outputs, strict=True)), cos, sin, rotation)
        for x, y in zip(inputs, outputs, strict=True):
            exact = oracle(x.double(), cos.double(), sin.double(), **options)
            torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
        grads = [draw(strided(shape, expanded=False)).to(device) for shape in shapes]
        primitives(backend).rotate(list(zip(inputs, grads, strict=True)), cos, sin, rotation.transpose())
        for g, grad in zip(inputs, grads, strict=True):
            x = torch.randn(g.shape, dtype=torch.float64, device=device, requires_grad=True)
            oracle(x, cos.double(), sin.double(), **options).backward(g.double())
            torch.testing.assert_close(grad.double(), x.grad, rtol=1e-5, atol=1e-5)


def test_more_heads_than_a_tile(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    triton_rotary = pytest.importorskip("slothplug.kernels.triton.rotary")
    monkeypatch.setattr(triton_rotary, "_TILES", (triton_rotary.Tile(elements=32, num_warps=1),))
    triton_rotary._plan.cache_clear()  # plans of the table's tiles, and afterwards those of this test's
    request.addfinalizer(triton_rotary._plan.cache_clear)
    q, k = torch.randn(1, 11, 1, 20, device=device), torch.randn(1, 3, 1, 20, device=device)
    cos, sin = torch.randn(2, 1, 1, 16, device=device)
    g = (torch.randn_like(q), torch.randn_like(k))
    ours = with_gradients(lambda q, k: rotary(q, k, cos, sin, backend="triton"), q, k, g)
    exact = with_gradients(exactly(cos, sin, {}), q.double(), k.double(), g)
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


def test_outputs_and_gradients_lie_as_the_inputs(backend: Backend, device: torch.device) -> None:
    """Views of one packed projection, [B, T, (Hq + 2 Hk) D], as attention makes them; the gradient is expanded."""
    packed = torch.randn(2, 3, 7 * 8, device=device, requires_grad=True)
    q = packed[..., :40].view(2, 3, 5, 8).transpose(1, 2)
    k = packed[..., 40:48].view(2, 3, 1, 8).transpose(1, 2)
    grads = {}
    q.register_hook(lambda g: grads.update(q=g))
    k.register_hook(lambda g: grads.update(k=g))
    cos, sin = torch.randn(2, 1, 3, 8, device=device)
    outputs = rotary(q, k, cos, sin, backend=backend)
    (outputs[0].sum() + outputs[1].sum()).backward()
    for x, y, grad in zip((q, k), outputs, (grads["q"], grads["k"]), strict=True):
        assert y.transpose(1, 2).is_contiguous()
        assert grad.transpose(1, 2).is_contiguous()
        reference = x.detach().clone().requires_grad_()
        oracle(reference, cos, sin).sum().backward()
        torch.testing.assert_close(grad, reference.grad)


@pytest.mark.parametrize("trains", ["q", "k", "both"])
def test_gradients_are_those_asked_for(trains: str, backend: Backend, device: torch.device) -> None:
    q = torch.randn(1, 2, 2, 4, device=device, requires_grad=trains != "k")
    k = torch.randn(1, 1, 2, 4, device=device, requires_grad=trains != "q")
    cos, sin = torch.randn(2, 1, 2, 4, device=device)
    before = [t.detach().clone() for t in (q, k, cos, sin)]
    outputs = rotary(q, k, cos, sin, backend=backend)
    node = outputs[0].grad_fn
    rotated: list[int] = []
    rotate = node.primitives.rotate

    class Recorder:
        @staticmethod
        def rotate(pairs: Any, *args: Any) -> None:
            rotated.append(len(pairs))
            rotate(pairs, *args)

    node.primitives = Recorder
    g = [torch.randn_like(y) for y in outputs]
    kept = [x.clone() for x in g]
    torch.autograd.backward(outputs, g)
    assert (q.grad is not None, k.grad is not None) == (trains != "k", trains != "q")
    assert rotated == [2 if trains == "both" else 1]
    assert all(torch.equal(a, b) for a, b in zip((*before, *kept), (q, k, cos, sin, *g), strict=True))


def test_an_unused_output_gets_no_gradient(backend: Backend, device: torch.device) -> None:
    q, k = (torch.randn(1, 2, 2, 4, device=device, requires_grad=True) for _ in range(2))
    cos, sin = torch.randn(2, 1, 2, 4, device=device)
    rotary(q, k, cos, sin, backend=backend)[1].sum().backward()
    assert q.grad is None
    assert k.grad is not None


def test_backward_twice_gives_the_same_bits(backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    q, k = (torch.randn(1, 2, 2, 4, device=device).to(dtype).requires_grad_() for _ in range(2))
    cos, sin = torch.randn(2, 1, 2, 4, device=device).to(dtype)
    outputs = rotary(q, k, cos, sin, backend=backend)
    g = [torch.randn_like(y) for y in outputs]
    first = torch.autograd.grad(outputs, (q, k), g, retain_graph=True)
    second = torch.autograd.grad(outputs, (q, k), g)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_one_tensor_alone(backend: Backend, device: torch.device) -> None:
    q = torch.randn(1, 2, 2, 4, device=device, requires_grad=True)
    cos, sin = torch.randn(2, 1, 2, 4, device=device)
    rotated, nothing = rotary(q, None, cos, sin, backend=backend)
    assert nothing is None
    rotated.backward(torch.ones_like(rotated))
    together = rotary(q, q, cos, sin, backend=backend)
    assert torch.equal(rotated, together[0])
    assert torch.equal(rotated, together[1])


@pytest.mark.parametrize(
    "shapes", [((0, 2, 3, 4), (0, 1, 3, 4)), ((2, 2, 0, 4), (2, 1, 0, 4)), ((1, 0, 3, 4), (1, 1, 3, 4))]
)
def test_nothing_to_rotate(shapes: tuple[tuple[int, ...], ...], backend: Backend, device: torch.device) -> None:
    q, k = (torch.ones(shape, device=device, requires_grad=True) for shape in shapes)
    cos, sin = torch.ones(2, 1, q.shape[2], 4, device=device)
    outputs = rotary(q, k, cos, sin, backend=backend)
    (outputs[0].sum() + outputs[1].sum()).backward()
    assert [y.shape for y in outputs] == [q.grad.shape, k.grad.shape] == [torch.Size(shape) for shape in shapes]


@pytest.mark.parametrize("promote", [True, False])
def test_dtype_of_the_output(promote: bool, device: torch.device) -> None:
    """bfloat16 q and k with float32 tables, as under autocast: float32 where the eager function promotes."""
    q = torch.randn(1, 2, 2, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(1, 1, 2, 4, device=device)
    cos, sin = torch.randn(2, 1, 2, 4, device=device)
    outputs = rotary(q, k, cos, sin, promote=promote)
    assert [y.dtype for y in outputs] == [torch.float32 if promote else torch.bfloat16, torch.float32]
    outputs[0].sum().backward()
    assert q.grad.dtype is torch.bfloat16


def test_offsets_beyond_32_bits(backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/803, cheaply: heads and tokens that lie 2^31 elements apart."""
    storage = torch.empty(2**31 + 2**27, dtype=torch.float16, device=device)
    q = storage.as_strided((1, 3, 2, 4), (0, 2**30, 2**26, 1)).normal_()
    k = storage.as_strided((1, 2, 2, 4), (0, 64, 2**31 + 2**26, 1), 1024).normal_()
    cos, sin = torch.randn(2, 1, 2, 4, device=device).half()
    near = rotary(q.contiguous(), k.contiguous(), cos, sin, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(rotary(q, k, cos, sin, backend=backend), near, strict=True))


def test_refuses_what_it_cannot_do(backend: Backend, device: torch.device) -> None:
    q, k = torch.ones(2, 2, 3, 4, device=device), torch.ones(2, 1, 3, 4, device=device)
    table = torch.ones(1, 3, 4, device=device)
    with pytest.raises(TypeError, match="float64"):
        rotary(q.double(), k, table, table, backend=backend)
    with pytest.raises(ValueError, match="require one"):
        rotary(q, k, table.clone().requires_grad_(), table, backend=backend)
    for wrong in (table[:, :2], table[..., :3], table.repeat(1, 1, 2), table.repeat(3, 1, 1), table[0]):
        with pytest.raises(ValueError, match=r"do not fit|must be even"):
            rotary(q, k, wrong, wrong, backend=backend)
    with pytest.raises(ValueError, match="heads only"):
        rotary(q, k[:, :, :2], table, table, backend=backend)
    for options in ({"pairing": "odd"}, {"output": "odd"}, {"table": "odd"}, {"table": "repeat"}, {"backend": "odd"}):
        with pytest.raises(ValueError, match=r"odd|no meaning"):
            rotary(q, k, table, table, **{"backend": backend, **options})
