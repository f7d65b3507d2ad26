"""Rotary functions and attention classes that nobody listed: recognised by their numbers, or left with the reason."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from slothplug.ops.rotary.recognition import identify
from slothplug.patching.served import STATE
from slothplug.patching.sites import Refusal
from tests.patching.rotary import rotary_report

# Rotary functions


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def remote_rotary(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    return remote_rotary(q, k, cos, sin, unsqueeze_dim)


def partial_heads(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    r = cos.shape[-1]
    a, b = remote_rotary(q[..., :r], k[..., :r], cos, sin, unsqueeze_dim)
    return torch.cat((a, q[..., r:]), -1), torch.cat((b, k[..., r:]), -1)


def last_elements(x, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    cos, sin = (t.repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    head, tail = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    return torch.cat((head, (tail.float() * cos + rotate_pairs(tail).float() * sin).to(x.dtype)), -1)


def tables_reversed(tensor, sin, cos):  # type: ignore[no-untyped-def]
    sin, cos = (t[:, :, None, :].repeat_interleave(2, 3) for t in (sin, cos))
    return tensor * cos + rotate_pairs(tensor) * sin


def deinterleaved(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return remote_rotary(q, k, cos, sin, unsqueeze_dim)


def vision(q, k, cos, sin):  # type: ignore[no-untyped-def]
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    return tuple((x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (q, k))


def wrong_sign(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    return remote_rotary(q, k, cos, -sin, unsqueeze_dim)


def scaled(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    q, k = remote_rotary(q, k, cos, sin, unsqueeze_dim)
    return q * 1.01, k


def three_tensors(q, k, v, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    return (*remote_rotary(q, k, cos, sin, unsqueeze_dim), v)


def sections(q, k, cos, sin, mrope_section, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
    return remote_rotary(q, k, cos, sin, unsqueeze_dim)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (remote_rotary, ("half", "same", "cat", False, True)),
        (with_positions, ("half", "same", "cat", False, True)),
        (partial_heads, ("half", "same", "cat", False, True)),
        (last_elements, ("interleaved", "same", "single", True, False)),
        (tables_reversed, ("interleaved", "same", "single", False, True)),
        (deinterleaved, ("interleaved", "half", "halves", False, True)),
        (vision, ("half", "same", "cat", False, False)),
    ],
)
def test_functions_are_recognised_by_their_numbers(function: FunctionType, expected: tuple[Any, ...]) -> None:
    rotation = identify(function)
    assert not isinstance(rotation, Refusal), rotation
    s = rotation.style
    assert (s.pairing, s.output, s.table, s.rotate_last, s.promote) == expected
    assert rotation.partial == (function in (partial_heads, last_elements))


def apply_rotary_complex(q, k, freqs_cis):  # type: ignore[no-untyped-def]
    q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs_cis for x in (q, k))
    return torch.view_as_real(q).flatten(-2), torch.view_as_real(k).flatten(-2)


@pytest.mark.parametrize("function", [wrong_sign, scaled, three_tensors, sections, apply_rotary_complex])
def test_functions_that_compute_something_else_are_not_recognised(function: FunctionType) -> None:
    assert isinstance(identify(function), Refusal)


# Attention classes


class RemoteAttention(nn.Module):
    """An attention as a model's own code would have it."""

    def __init__(self, width: int = 8, rows: int = 1) -> None:
        super().__init__()
        self.q = nn.Linear(16, 4 * 8)
        self.width, self.rows = width, rows

    def tables(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(self.rows * tokens).view(self.rows, tokens, 1) * torch.rand(self.width // 2)
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x).view(*x.shape[:2], 4, 8).transpose(1, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        torch.manual_seed(1)
        cos, sin = self.tables(x.shape[1])
        q, k = remote_rotary(self.heads(x), self.heads(x)[:, :2], cos, sin)
        return torch.cat((q, k), 1) * scale


class PartialAttention(RemoteAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        cos, sin = self.tables(x.shape[1])
        q, k = partial_heads(self.heads(x).transpose(1, 2), self.heads(x).transpose(1, 2), cos, sin, unsqueeze_dim=2)
        return torch.cat((q, k), 1)


class LearnedTables(RemoteAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.tables(x.shape[1])
        return remote_rotary(self.heads(x), self.heads(x), cos.requires_grad_(), sin)[0]


class Complex(RemoteAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_complex(self.heads(x), self.heads(x), torch.polar(*torch.ones(2, x.shape[1], 4)))[0]


class WithSections(RemoteAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sections(self.heads(x), self.heads(x), *self.tables(x.shape[1]), [1, 1, 2])[0]


class EitherFunction(RemoteAttention):
    def forward(self, x: torch.Tensor, known: bool) -> torch.Tensor:
        torch.manual_seed(1)
        function = remote_rotary if known else scaled
        return torch.cat(function(self.heads(x), self.heads(x), *self.tables(x.shape[1])), 1)


def served_and_stock(module: nn.Module) -> tuple[nn.Module, slothplug.Report]:
    stock = copy.deepcopy(module)
    return stock, rotary_report(nn.Sequential(module))


def assert_trains_as(module: nn.Module, stock: nn.Module) -> None:
    x = torch.randn(3, 200, 16)
    outputs = [m(x) for m in (module, stock)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    projection = torch.randn_like(outputs[0])
    ours = torch.autograd.grad(outputs[0], list(module.parameters()), projection)
    theirs = torch.autograd.grad(outputs[1], list(stock.parameters()), projection)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_class_of_the_models_own_code_is_served(rows: int) -> None:
    module = RemoteAttention(rows=rows)
    stock, report = served_and_stock(module)
    assert_trains_as(module, stock)
    assert [site.calls.served for site in report.fused] == [1]
    assert not report.fused[0].calls.fallbacks
    assert RemoteAttention.forward.__globals__["remote_rotary"] is remote_rotary


def as_kernels_package_has_it(function: FunctionType) -> nn.Module:
    """What the package ``kernels`` makes of a function that it may replace: a module that calls it."""

    class Func(nn.Module):
        kernel_layer_name = "rotary_pos_emb"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Func()


def test_a_function_that_the_kernels_package_made_a_module_of_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = as_kernels_package_has_it(remote_rotary)
    monkeypatch.setitem(globals(), "remote_rotary", wrapped)
    module = RemoteAttention()
    stock, report = served_and_stock(module)
    assert_trains_as(module, stock)
    assert report.fused[0].calls.served == 1
    assert RemoteAttention.forward.__globals__["remote_rotary"] is wrapped


def test_a_kernel_that_was_put_in_a_functions_place_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """``use_kernels`` binds another forward on the module that stands for the function."""
    wrapped = as_kernels_package_has_it(remote_rotary)
    wrapped.forward = lambda *args, **kwargs: remote_rotary(*args, **kwargs)  # type: ignore[method-assign]
    monkeypatch.setitem(globals(), "remote_rotary", wrapped)
    with pytest.warns(slothplug.NothingFusedWarning):
        assert not rotary_report(nn.Sequential(RemoteAttention())).sites


@pytest.mark.parametrize("width", [2, 4, 6, 8])
def test_a_head_may_rotate_in_part(width: int) -> None:
    """https://github.com/linkedin/Liger-Kernel/pull/1451: pairs lie R/2 apart and the tail is handed on to the bit."""
    module = PartialAttention(width, rows=3)
    stock, report = served_and_stock(module)
    assert_trains_as(module, stock)
    assert not report.fused[0].calls.fallbacks
    x = torch.randn(3, 200, 16)
    assert torch.equal(module(x)[..., width:], stock(x)[..., width:])


def test_tables_too_narrow_for_the_function_fail_as_in_stock() -> None:
    module = RemoteAttention(width=4)
    _, report = served_and_stock(module)
    with pytest.raises(RuntimeError, match="must match the size"):
        module(torch.randn(1, 5, 16))
    assert report.fused[0].calls.fallbacks.total() == 1


def test_tables_that_are_trained_go_to_the_original_function() -> None:
    module = LearnedTables()
    _, report = served_and_stock(module)
    module(torch.randn(1, 5, 16)).sum().backward()
    assert report.fused[0].calls.fallbacks == {"remote_rotary: the tables require gradients": 1}


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (WithSections, "sections takes (q, k, cos, sin, mrope_section"),
        (Complex, "apply_rotary_complex takes (q, k, freqs_cis)"),
    ],
)
def test_what_is_not_recognised_is_left_with_the_reason(attention: type[nn.Module], reason: str) -> None:
    with pytest.warns(slothplug.NothingFusedWarning):
        report = rotary_report(nn.Sequential(attention()))
    assert reason in report.left[0].reason


def test_a_function_that_is_not_recognised_beside_one_that_is_counts_as_fallen_back() -> None:
    module = EitherFunction()
    stock, report = served_and_stock(module)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(module(x, True), stock(x, True))
    calls = report.fused[0].calls
    assert (calls.served, calls.fallbacks.total()) == (1, 0)
    assert torch.equal(module(x, False), stock(x, False))
    assert calls.served == 1
    assert calls.fallbacks == {"scaled computes something else than the known rotations": 1}


def test_a_class_whose_forward_somebody_replaced_is_served_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/axolotl-ai-cloud/axolotl/issues/2770: what counts is what the class does, not its source."""

    def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        cos, sin = self.tables(x.shape[1])
        return 2 * remote_rotary(self.heads(x), self.heads(x), cos, sin)[0]

    monkeypatch.setattr(RemoteAttention, "forward", doubled)
    module = RemoteAttention()
    stock, report = served_and_stock(module)
    assert_trains_as(module, stock)
    assert report.fused[0].calls.served == 1


def test_a_forward_replaced_on_the_instance_is_left() -> None:
    module = RemoteAttention()
    module.forward = functools.partial(RemoteAttention.forward, module)  # type: ignore[method-assign]
    with pytest.warns(slothplug.NothingFusedWarning):
        report = rotary_report(nn.Sequential(module))
    assert "replaced on the instance" in report.left[0].reason


def test_a_global_exchanged_by_somebody_is_seen_at_the_next_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = RemoteAttention()
    rotary_report(nn.Sequential(module)).undo()
    monkeypatch.setitem(globals(), "remote_rotary", scaled)
    with pytest.warns(slothplug.NothingFusedWarning):
        report = rotary_report(nn.Sequential(module))
    assert "computes something else" in report.left[0].reason


def test_a_checkpointed_layer_that_rotates_itself_keeps_its_checkpoint() -> None:
    layers = pytest.importorskip("transformers.modeling_layers")

    class Layer(layers.GradientCheckpointingLayer):
        def __init__(self) -> None:
            super().__init__()
            self.attention = RemoteAttention()
            self.runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            torch.manual_seed(1)
            cos, sin = self.attention.tables(x.shape[1])
            # The square keeps its input, so that the recompute does not stop before the rotation has returned.
            return remote_rotary(self.attention.heads(x), self.attention.heads(x), cos, sin)[0].square()

    layer = Layer().train()
    stock, report = served_and_stock(layer)
    for module in (layer, stock):
        module.gradient_checkpointing = True
        module._gradient_checkpointing_func = functools.partial(
            torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=False
        )
        module(torch.ones(1, 5, 16)).sum().backward()
    assert layer.runs == stock.runs == 2
    torch.testing.assert_close(layer.attention.q.weight.grad, stock.attention.q.weight.grad)
    site = next(site for site in report.fused if site.name == "0")
    assert site.calls.served == 2


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "old_scale" in kwargs:
            warnings.warn("old_scale is deprecated", FutureWarning, stacklevel=2)
            kwargs["scale"] = kwargs.pop("old_scale")
        return function(*args, **kwargs)

    wrapper.marker = "kept"  # type: ignore[attr-defined]
    return wrapper


def test_decorators_are_kept() -> None:
    class Decorated(RemoteAttention):
        forward = decorated(decorated(RemoteAttention.forward))

    module = Decorated()
    stock, report = served_and_stock(module)
    assert_trains_as(module, stock)
    x = torch.randn(1, 5, 16)
    with pytest.warns(FutureWarning, match="old_scale"):
        got = module(x, old_scale=3.0)
    assert torch.allclose(got, stock(x, scale=3.0), atol=1e-5)
    assert report.fused[0].calls.served == 2
    rebuilt = module.__dict__[STATE].spec.forward
    assert rebuilt.marker == "kept"
    assert rebuilt.__wrapped__ is not Decorated.forward.__wrapped__
    assert rebuilt.__wrapped__.__wrapped__.__globals__["remote_rotary"] is not remote_rotary


def test_transformers_own_deprecation_still_warns() -> None:
    deprecation = pytest.importorskip("transformers.utils.deprecation")

    class Renamed(RemoteAttention):
        forward = deprecation.deprecate_kwarg("factor", version="99.0", new_name="scale")(RemoteAttention.forward)

    module = Renamed()
    _, report = served_and_stock(module)
    with pytest.warns(FutureWarning, match="`factor` is deprecated"):
        module(torch.randn(1, 5, 16), factor=2.0)
    assert report.fused[0].calls.served == 1
