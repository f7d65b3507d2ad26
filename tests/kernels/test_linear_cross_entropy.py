"""Linear + cross-entropy, on both backends: every option against float64, exactness, chunks, refusals and memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import slothplug.kernels.linear_cross_entropy as module
from slothplug.exactness import OP_DRAWS, Exactness
from slothplug.kernels import logit_chunks, products
from slothplug.kernels.backend import Backend
from slothplug.kernels.cross_entropy import EpilogueStep
from slothplug.kernels.linear_cross_entropy import LowRank, Reduction, linear_cross_entropy
from slothplug.kernels.logit_chunks import chunk_rows

# The interpreter computes the padding behind the vocabulary, which holds anything, and numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

IGNORED = -100
RANK = 5
EPILOGUES: dict[str, tuple[EpilogueStep, ...]] = {
    "none": (),
    "cast": (("cast", torch.float32),),
    "softcap": (("div", 3.0), ("tanh", None), ("mul", 3.0), ("cast", torch.float32)),
    "scale": (("mul", 0.0625), ("cast", torch.float32)),
    "divide": (("cast", torch.float32), ("div", 1.3), ("mul", 0.7)),
}


def apply_steps(logits: Tensor, steps: Sequence[EpilogueStep], cast: bool = True) -> Tensor:
    for name, value in steps:
        if name == "mul":
            logits = logits * value
        elif name == "div":
            logits = logits / value
        elif name == "tanh":
            logits = torch.tanh(logits)
        elif cast:
            logits = logits.to(value)
    return logits


def stock(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    epilogue: Sequence[EpilogueStep] = (),
    **options: Any,
) -> Tensor:
    class_weight = options.pop("class_weight", None)
    logits = F.linear(hidden, weight, bias)
    if low_rank is not None:  # PEFT's order of roundings
        logits = (logits + F.linear(low_rank.u, low_rank.b) * low_rank.scaling).to(logits.dtype)
    logits = apply_steps(logits, epilogue)
    return F.cross_entropy(logits, labels, weight=class_weight, **options)


def oracle(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    low_rank: LowRank | None = None,
    epilogue: Sequence[EpilogueStep] = (),
    reduction: str = "mean",
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """The definition, in the float64 that the operands come in."""
    vocabulary = weight.shape[0]
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits if low_rank is None else logits + low_rank.scaling * (low_rank.u @ low_rank.b.T)
    logits = apply_steps(logits, epilogue, cast=False)
    lse = torch.logsumexp(logits, 1)
    counted = labels != ignore_index
    target = labels.where(counted, 0)
    w = torch.ones(vocabulary, dtype=logits.dtype, device=logits.device)
    w = w if class_weight is None else class_weight.double()
    nll = w[target] * (lse - logits.gather(1, target[:, None])[:, 0])
    loss = (1 - label_smoothing) * nll + z_loss * lse**2
    if label_smoothing:
        loss = loss + label_smoothing / vocabulary * (w * (lse[:, None] - logits)).sum(1)
    loss = torch.where(counted, loss, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / w[target].where(counted, 0.0).sum() if reduction == "mean" else loss.sum()


def differentiate(
    function: Callable[..., Tensor], grad_output: Tensor | float, *tensors: Tensor | None
) -> list[Tensor]:
    """The loss, then the gradients of the tensors that are given: hidden, weight, bias, u and b."""
    leaves = [t.detach().requires_grad_() for t in tensors if t is not None]
    loss = function(*leaves)
    grad_output = torch.as_tensor(grad_output, dtype=loss.dtype, device=loss.device).expand(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad_output)]


def draw_labels(count: int, vocabulary: int, generator: torch.Generator | None = None, ignored: float = 0.4) -> Tensor:
    labels = torch.randint(vocabulary, (count,), generator=generator)
    return labels.where(torch.rand(count, generator=generator) >= ignored, IGNORED)


def skip_if_not_rounded(backend: Backend, dtype: torch.dtype, device: torch.device) -> None:
    if dtype is torch.bfloat16 and interpreted(backend, device):
        pytest.skip("Triton's interpreter truncates where it stores bfloat16")


Draw = Callable[[int], tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]


def assert_as_exact(draw: Draw, dtype: torch.dtype, context: str = "") -> None:
    """``exactness.assert_as_exact`` for operands of ``dtype``.

    The loss is measured in the unit roundoff of the logits that it was computed from, also where they were cast.
    """
    pool = Exactness()
    for seed in range(OP_DRAWS):
        pool.add(*draw(seed))
    pool.tensors["loss"].dtype = dtype
    pool.check(context)


def assert_close_as_stock(got: list[Tensor], stocks: list[Tensor], want: list[Tensor]) -> None:
    """Energy of the error at most 1.25 times stock's, or 1e-6, tensor by tensor."""
    for mine, theirs, reference in zip(got, stocks, want, strict=True):
        limit = 1.25 * (theirs - reference).norm() + 1e-6 * reference.norm()
        assert (mine - reference).norm() <= limit


def interpreted(backend: Backend, device: torch.device) -> bool:
    return backend == "triton" and device.type == "cpu"


# The reduction, and what a trainer makes of its loss.
HOW: dict[str, tuple[Reduction, Callable[[Tensor, float], Tensor]]] = {
    "mean": ("mean", lambda loss, items: loss),
    "mean_scaled": ("mean", lambda loss, items: loss * 0.3),
    "sum_over_items": ("sum", lambda loss, items: loss / items),
    "none_weighted": ("none", lambda loss, items: (loss * torch.linspace(0, 2, loss.numel()).to(loss)).sum()),
}


def exactness_draw(
    dtype: torch.dtype,
    device: torch.device,
    how: str,
    mixed: bool,
    backend: Backend,
    sizes: tuple[int, int, int] = (12, 32, 257),
    ours_only: dict[str, Any] | None = None,
    term: torch.dtype | None = None,
    **options: Any,
) -> Draw:
    """A draw for ``assert_as_exact``: rows of rms 1e-3, 1 and 1e3 where ``mixed``, else logits of size 2.

    With ``term``, a low-rank term of that dtype as large as the product itself.
    """
    reduction, finish = HOW[how]
    count, width, vocabulary = sizes

    def draw(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        rms = torch.tensor([1e-3, 1.0, 1e3])[torch.randint(3, (count, 1), generator=generator)] if mixed else 1.0
        hidden = torch.randn(count, width, generator=generator) * rms
        weight = torch.randn(vocabulary, width, generator=generator) * ((4e-3 if mixed else 2.0) / width**0.5)
        bias = torch.randn(vocabulary, generator=generator) * 0.1
        labels = draw_labels(count, vocabulary, generator).to(device)
        items = float(torch.randint(count, 5 * count, (), generator=generator))
        tensors = [t.to(device, dtype) for t in (hidden, weight, bias)]
        if term is not None:
            u = torch.randn(count, RANK, generator=generator) * rms
            factor = torch.randn(vocabulary, RANK, generator=generator) * ((4e-3 if mixed else 2.0) / RANK**0.5 / 0.7)
            tensors += [t.to(device, term) for t in (u, factor)]

        def named(function: Callable[..., Tensor], operands: list[Tensor], **extra: Any) -> dict[str, Tensor]:
            def call(h: Tensor, w: Tensor, b: Tensor, *low: Tensor) -> Tensor:
                if low:
                    extra["low_rank"] = LowRank(*low, 0.7)
                return finish(function(h, w, labels, bias=b, reduction=reduction, **options, **extra), items)

            names = ("loss", "d_hidden", "d_weight", "d_bias", "d_u", "d_b")[: 1 + len(operands)]
            return dict(zip(names, differentiate(call, 1.0, *operands), strict=True))

        ours = named(linear_cross_entropy, tensors, backend=backend, **(ours_only or {}))
        return ours, named(stock, tensors), named(oracle, [t.double() for t in tensors])

    return draw


@pytest.mark.parametrize("mixed", [False, True], ids=["one_rms", "mixed_rms"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_exact_as_stock(dtype: torch.dtype, how: str, mixed: bool, backend: Backend, device: torch.device) -> None:
    skip_if_not_rounded(backend, dtype, device)
    if interpreted(backend, device) and (how.startswith("mean") or mixed):
        pytest.skip("interpreted, each of these takes many seconds; the others run the same kernel code")
    draw = exactness_draw(dtype, device, how, mixed, backend, (8, 32, 257), epilogue=EPILOGUES["cast"])
    assert_as_exact(draw, dtype, f"{backend} {dtype} {how}")


@pytest.mark.parametrize("epilogue", ["none", "softcap", "scale", "divide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_epilogues_as_exact_as_stock(dtype: torch.dtype, epilogue: str, backend: Backend, device: torch.device) -> None:
    skip_if_not_rounded(backend, dtype, device)
    if interpreted(backend, device) and (dtype is torch.float16 or epilogue == "none"):
        pytest.skip("interpreted, each of these takes many seconds; the others run the same kernel code")
    draw = exactness_draw(dtype, device, "sum_over_items", False, backend, (6, 32, 257), epilogue=EPILOGUES[epilogue])
    assert_as_exact(draw, dtype, f"{backend} {dtype} {epilogue}")


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_options_as_exact_as_stock(
    label_smoothing: float, weighted: bool, backend: Backend, device: torch.device
) -> None:
    class_weight = torch.rand(257, generator=torch.Generator().manual_seed(1)).to(device) if weighted else None
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "class_weight": class_weight}
    if interpreted(backend, device) and not (label_smoothing and weighted):
        pytest.skip("interpreted, each of these takes many seconds; both options together run the same kernel code")
    draw = exactness_draw(torch.float32, device, "mean", False, backend, (6, 32, 257), **options)
    assert_as_exact(draw, torch.float32, backend)


@pytest.mark.parametrize("epilogue", ["cast", "softcap", "divide"])
@pytest.mark.parametrize("how", ["mean", "mean_scaled", "sum_over_items"])
def test_bfloat16_ahead_as_exact_as_stock(how: str, epilogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does with bfloat16, gradients ahead and kept in float32, with its float32 product emulated."""
    monkeypatch.setattr(module, "_exact_ahead", lambda hidden: True)
    monkeypatch.setattr(logit_chunks, "product", lambda a, b, out: out.copy_(a.float() @ b.float()))
    draw = exactness_draw(
        torch.bfloat16, torch.device("cpu"), how, False, "torch", (6, 32, 257), epilogue=EPILOGUES[epilogue]
    )
    assert_as_exact(draw, torch.bfloat16, f"{how} {epilogue}")


TERMS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
]


@pytest.mark.parametrize("mixed", [False, True], ids=["one_rms", "mixed_rms"])
@pytest.mark.parametrize("how", ["mean", "sum_over_items", "none_weighted"])
@pytest.mark.parametrize(("dtype", "term"), TERMS, ids=str)
def test_low_rank_terms_as_exact_as_stock(
    dtype: torch.dtype, term: torch.dtype, how: str, mixed: bool, backend: Backend, device: torch.device
) -> None:
    """https://github.com/huggingface/trl/issues/4612: the adapter of the head was neither used nor trained."""
    skip_if_not_rounded(backend, dtype, device)
    others = mixed or how != "none_weighted" or (dtype, term) != (torch.float32, torch.bfloat16)
    if interpreted(backend, device) and others:
        pytest.skip("interpreted, each takes a minute; the term's products are PyTorch's on both backends")
    ours_only = {"chunk_bytes": 5 * 320 * dtype.itemsize}  # chunks of 5 and 3 rows
    draw = exactness_draw(
        dtype, device, how, mixed, backend, (8, 32, 257), ours_only, term=term, epilogue=EPILOGUES["cast"]
    )
    assert_as_exact(draw, dtype, f"{backend} {dtype} {term} {how}")


@pytest.mark.parametrize("term", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["mean", "mean_scaled", "sum_over_items"])
def test_low_rank_terms_ahead_as_exact_as_stock(how: str, term: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does with bfloat16, as above."""

    def product(a: Tensor, b: Tensor, out: Tensor, scaling: float = 1.0) -> None:
        out.copy_(scaling * (a.float() @ b.float()))

    monkeypatch.setattr(module, "_exact_ahead", lambda hidden: True)
    monkeypatch.setattr(logit_chunks, "product", product)
    draw = exactness_draw(
        torch.bfloat16, torch.device("cpu"), how, False, "torch", (6, 32, 257), term=term, epilogue=EPILOGUES["scale"]
    )
    assert_as_exact(draw, torch.bfloat16, f"{how} {term}")


def test_a_term_that_rounds_d_logits_sees_the_loss_scale(backend: Backend, device: torch.device) -> None:
    """A float16 adapter on a float32 head: d logits of 1e-9 are nothing in float16, and times 65536 they are not."""
    hidden, weight = torch.zeros(4, 2, device=device), torch.zeros(8192, 2, device=device)
    u, b = torch.ones(4, 1, device=device).half(), torch.zeros(8192, 1, device=device).half()
    b[0] = 12.0
    labels = torch.zeros(4, dtype=torch.int64, device=device)

    def ours(u: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, low_rank=LowRank(u, b, 1.0), backend=backend)

    def reference(u: Tensor, b: Tensor) -> Tensor:
        return oracle(hidden.double(), weight.double(), labels, low_rank=LowRank(u, b, 1.0))

    got, want = differentiate(ours, 65536.0, u, b), differentiate(reference, 65536.0, u.double(), b.double())
    assert (got[2] != 0).all()
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=4e-3, atol=1e-5)


def test_weight_gradient_is_accumulated_in_float32(backend: Backend, device: torch.device) -> None:
    """https://github.com/apple/ml-cross-entropy/issues/14: many chunks, a small vocabulary, low precision."""
    if interpreted(backend, device):
        pytest.skip("the products are the same on both backends, and the interpreter takes a minute for so many rows")
    count = 1024
    draw = exactness_draw(
        torch.bfloat16,
        device,
        "sum_over_items",
        False,
        backend,
        (count, 16, 32),
        ours_only={"chunk_bytes": count // 16 * 64 * 2},
        epilogue=EPILOGUES["cast"],
    )
    assert_as_exact(draw, torch.bfloat16, backend)


def test_accumulation_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ROWS", 7)
    a, b = torch.randn(2, 5, 20, dtype=torch.bfloat16), torch.randn(2, 5, 3, dtype=torch.bfloat16)
    total = torch.full((20, 3), torch.nan)
    for index in range(2):
        products.accumulate(total, a[index].t(), b[index], first=index == 0)
    torch.testing.assert_close(total, sum(x.float().t() @ y.float() for x, y in zip(a, b, strict=True)))


@st.composite
def strided(draw: st.DrawFn) -> Callable[[Tensor], Tensor]:
    """A function that gives a tensor other strides and keeps its values."""
    kind = draw(st.sampled_from(["contiguous", "wider", "every_other", "transposed"]))

    def lay(x: Tensor) -> Tensor:
        if kind == "wider":
            return torch.cat((x, x), -1)[..., x.shape[-1] :]
        if kind == "every_other":
            return torch.stack((x, x), -1)[..., 1]
        return x.t().contiguous().t() if kind == "transposed" and x.ndim == 2 else x

    return lay


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_strides_and_options(data: st.DataObject, backend: Backend, device: torch.device) -> None:
    count, width = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 9))
    vocabulary = data.draw(st.integers(1, 70))
    ignore_index = data.draw(st.sampled_from([IGNORED, 0, vocabulary]))
    labels = torch.randint(vocabulary, (count,))
    labels = labels.where(torch.rand(count) < 0.6, ignore_index).to(device)
    hidden, weight = torch.randn(count, width).to(device), torch.randn(vocabulary, width).to(device)
    bias = torch.randn(vocabulary).to(device) if data.draw(st.booleans()) else None
    rank = data.draw(st.sampled_from([None, 1, 3]))
    term = [] if rank is None else [torch.randn(count, rank).to(device), torch.randn(vocabulary, rank).to(device)]
    scaling = data.draw(st.sampled_from([1.0, -0.6]))
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": data.draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.1, 1.0])),
        "class_weight": torch.rand(vocabulary).to(device) if data.draw(st.booleans()) else None,
        "z_loss": data.draw(st.sampled_from([0.0, 1e-2])),
        "epilogue": EPILOGUES[data.draw(st.sampled_from(list(EPILOGUES)))],
    }
    spare = data.draw(st.sampled_from([None, 0, 1, 3]))
    max_valid = None if spare is None else int((labels != ignore_index).sum()) + spare
    lays = [data.draw(strided()) for _ in range(6)]

    def split(others: tuple[Tensor, ...], lays: Sequence[Callable[[Tensor], Tensor]]) -> dict[str, Any]:
        low = [lay(t) for lay, t in zip(lays, others[-2:], strict=False)] if term else None
        return {
            "bias": others[0] if bias is not None else None,
            "low_rank": LowRank(*low, scaling) if low is not None else None,
        }

    def ours(h: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        return linear_cross_entropy(
            lays[0](h),
            lays[1](w),
            lays[2](labels),
            **split(others, lays[4:]),
            max_valid=max_valid,
            chunk_bytes=data.draw(st.sampled_from([1, 1024, 2**20])),
            backend=backend,
            **options,
        )

    grad_output = lays[3](torch.randn(count if options["reduction"] == "none" else 1).to(device))
    grad_output = grad_output if options["reduction"] == "none" else grad_output[0]
    tensors = [t for t in (hidden, weight, bias, *term) if t is not None]
    got = differentiate(ours, grad_output, *tensors)
    doubles = [t.double() for t in tensors]

    def reference_of(h: Tensor, w: Tensor, *others: Tensor) -> Tensor:
        return oracle(h, w, labels, **split(others, [lambda t: t] * 2), **options)

    want = differentiate(reference_of, grad_output.double(), *doubles)
    for mine, reference in zip(got, want, strict=True):
        reference = reference if (labels != ignore_index).any() or mine is got[0] else torch.zeros_like(reference)
        torch.testing.assert_close(mine, reference.float(), equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 257, 65535, 65536, 65537, 128256, 151936, 262208])
def test_vocabularies(vocabulary: int, backend: Backend, device: torch.device) -> None:
    """https://github.com/unslothai/unsloth/issues/19: beyond 65536 lanes a kernel refused to launch."""
    torch.manual_seed(vocabulary)
    hidden, weight = torch.randn(3, 4).to(device), torch.randn(vocabulary, 4).to(device)
    labels = torch.tensor([vocabulary - 1, IGNORED, vocabulary // 2]).to(device)
    got = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, backend=backend), 1.0, hidden, weight)
    stocks = differentiate(lambda h, w: stock(h, w, labels), 1.0, hidden, weight)
    want = differentiate(lambda h, w: oracle(h, w, labels), 1.0, hidden.double(), weight.double())
    assert_close_as_stock(got, stocks, want)


@pytest.mark.parametrize("count", [0, 1, 7, 4097])
def test_token_counts(count: int, backend: Backend, device: torch.device) -> None:
    if count > 7 and interpreted(backend, device):
        pytest.skip("one program a row, and the interpreter takes milliseconds for each")
    torch.manual_seed(count)
    hidden, weight = torch.randn(count, 3).to(device), torch.randn(5, 3).to(device)
    labels = draw_labels(count, 5).to(device)
    got = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, backend=backend), 1.0, hidden, weight)
    want = differentiate(lambda h, w: oracle(h, w, labels), 1.0, hidden.double(), weight.double())
    for mine, reference in zip(got, want, strict=True):
        torch.testing.assert_close(mine, reference.float(), equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4097])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_result_does_not_depend_on_the_chunk(
    reduction: Reduction, count: int, backend: Backend, device: torch.device
) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3803: chunk means were added up."""
    if count > 9 and interpreted(backend, device):
        pytest.skip("the chunks are cut before the backend is called, and the interpreter takes a minute for these")
    torch.manual_seed(count)
    hidden, weight = torch.randn(count, 5).to(device), torch.randn(70, 5).to(device)
    labels = draw_labels(count, 70).to(device)
    labels[: min(4, count - 1)] = IGNORED  # one chunk of four rows has no label

    def run(rows: int) -> list[Tensor]:
        def call(h: Tensor, w: Tensor) -> Tensor:
            chunk_bytes = rows * 128 * 4
            return linear_cross_entropy(h, w, labels, reduction=reduction, chunk_bytes=chunk_bytes, backend=backend)

        return differentiate(call, 1.0, hidden, weight)

    whole = run(2 * count)
    for rows in {1, 4, count} - ({1} if count > 9 else set()):
        for mine, reference in zip(run(rows), whole, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-6 * reference.abs().max().item())


def test_chunks_follow_the_budget() -> None:
    assert chunk_rows(128256, 2, 512 * 2**20) == 2048
    assert chunk_rows(151936, 2, 512 * 2**20) == 1536
    assert chunk_rows(128256, 2, 2**20) == 4
    for vocabulary, size in itertools.product((257, 65537, 151936, 262208), (2, 4)):
        rows = chunk_rows(vocabulary, size, 512 * 2**20)
        assert rows % 256 == 0 or rows < 256
        assert 0 < rows * (-(-vocabulary // 64) * 64) * size <= 512 * 2**20
        assert chunk_rows(vocabulary, size, 1) == 1


class Watch(TorchDispatchMode):
    """Notes the rows times columns of every matrix product's result, and the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[int, ...]] = []
        self.largest = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if name in ("mm", "addmm"):
            self.products.append(tuple(out.shape))
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("trains", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_asked_for(
    reduction: Reduction, trains: tuple[bool, ...], backend: Backend, device: torch.device
) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/930: each combination of what needs a gradient."""
    count, width, vocabulary = 6, 3, 70
    operands = [torch.randn(count, width), torch.randn(vocabulary, width), torch.randn(vocabulary)]
    leaves = [t.to(device).requires_grad_(needs) for t, needs in zip(operands, trains, strict=True)]
    labels = draw_labels(count, vocabulary).to(device)
    with Watch() as watch:
        loss = linear_cross_entropy(
            leaves[0], leaves[1], labels, bias=leaves[2], reduction=reduction, backend=backend
        ).sum()
        if any(trains):
            loss.backward()
    again = reduction == "none" and any(trains)
    assert watch.products.count((count, vocabulary)) == 1 + again
    assert watch.products.count((count, width)) == trains[0]
    assert watch.products.count((vocabulary, width)) == trains[1]
    expected = stock(leaves[0], leaves[1], labels, bias=leaves[2], reduction=reduction).sum()
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert loss.requires_grad == any(trains)
    if any(trains):
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        for leaf, gradient in zip(asked, torch.autograd.grad(expected, asked), strict=True):
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-6)
    assert all((leaf.grad is not None) == needs for leaf, needs in zip(leaves, trains, strict=True))


@pytest.mark.parametrize("trains", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_asked_for_of_a_low_rank_term(
    reduction: Reduction, trains: tuple[bool, ...], backend: Backend, device: torch.device
) -> None:
    count, width, vocabulary = 6, 3, 70
    weight, labels = torch.randn(vocabulary, width).to(device), draw_labels(count, vocabulary, ignored=0.2).to(device)
    operands = [torch.randn(count, width), torch.randn(count, RANK), torch.randn(vocabulary, RANK)]
    leaves = [t.to(device).requires_grad_(needs) for t, needs in zip(operands, trains, strict=True)]
    hidden, low_rank = leaves[0], LowRank(leaves[1], leaves[2], 0.7)
    options: dict[str, Any] = {"low_rank": low_rank, "reduction": reduction}
    with Watch() as watch:
        loss = linear_cross_entropy(hidden, weight, labels, backend=backend, **options).sum()
        if any(trains):
            loss.backward()
    again = reduction == "none" and any(trains)
    assert watch.products.count((count, vocabulary)) == 2 * (1 + again)
    expected = stock(hidden, weight, labels, **options).sum()
    torch.testing.assert_close(loss, expected)
    for shape, leaf in zip(((count, width), (count, RANK), (vocabulary, RANK)), leaves, strict=True):
        assert watch.products.count(shape) == leaf.requires_grad
        assert (leaf.grad is not None) == leaf.requires_grad
        if leaf.requires_grad:
            (gradient,) = torch.autograd.grad(expected, leaf, retain_graph=True)
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_only_the_loss_is_computed(mode: Any, backend: Backend, device: torch.device) -> None:
    hidden = torch.randn(6, 3, device=device, requires_grad=True)
    weight = torch.randn(70, 3, device=device, requires_grad=True)
    labels = draw_labels(6, 70, ignored=0.2).to(device)
    with mode(), Watch() as watch:
        loss = linear_cross_entropy(hidden, weight, labels, backend=backend)
    assert watch.products == [(6, 70)]
    assert not loss.requires_grad
    torch.testing.assert_close(loss, stock(hidden, weight, labels).detach())


def test_ignored_rows_are_left_out_of_the_products(backend: Backend, device: torch.device) -> None:
    hidden, weight = torch.randn(8, 3).to(device), torch.randn(70, 3).to(device)
    labels = torch.tensor([IGNORED, 3, IGNORED, IGNORED, 69, 0, IGNORED, IGNORED]).to(device)

    def run(max_valid: int | None, reduction: Reduction) -> list[Tensor]:
        return differentiate(
            lambda h, w: linear_cross_entropy(h, w, labels, reduction=reduction, max_valid=max_valid, backend=backend),
            0.7,
            hidden,
            weight,
        )

    for reduction in ("mean", "sum", "none"):
        with Watch() as watch:
            dropped = run(3, reduction)
        assert {shape[0] for shape in watch.products} == {3, 70}
        for mine, reference in zip(dropped, run(None, reduction), strict=True):
            torch.testing.assert_close(mine, reference)
        assert (dropped[1][labels == IGNORED] == 0).all()
        with Watch() as watch:
            with_room = run(5, reduction)
        assert {shape[0] for shape in watch.products} == {5, 70}
        for mine, reference in zip(with_room, run(None, reduction), strict=True):
            torch.testing.assert_close(mine, reference)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="max_valid is 2, and 3 labels are not -100"):
            run(2, "mean")
    else:
        assert all(value.isnan().any() for value in run(2, "mean"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_valid", [None, 0])
def test_all_labels_ignored(max_valid: int | None, dtype: torch.dtype, backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/177; a loss over no items has an upstream gradient of inf."""
    hidden, weight = torch.randn(5, 3).to(device, dtype), torch.randn(70, 3).to(device, dtype)
    u, b = torch.randn(5, 2).to(device, dtype), torch.randn(70, 2).to(device, dtype)
    labels = torch.full((5,), IGNORED, device=device)
    for reduction, upstream in itertools.product(("mean", "sum", "none"), (1.0, float("inf"), float("nan"))):

        def call(
            function: Callable[..., Tensor], reduction: str = reduction, upstream: float = upstream, **extra: Any
        ) -> list[Tensor]:
            return differentiate(
                lambda h, w, u, b: function(h, w, labels, low_rank=LowRank(u, b, 2.0), reduction=reduction, **extra),
                upstream,
                hidden,
                weight,
                u,
                b,
            )

        got = call(linear_cross_entropy, max_valid=max_valid, backend=backend)
        for mine, reference in zip(got, call(stock), strict=True):
            torch.testing.assert_close(mine, reference, rtol=0, atol=0, equal_nan=True)
        assert all((gradient == 0).all() for gradient in got[1:])


@pytest.mark.parametrize("trains_hidden", [False, True])
def test_ignored_rows_of_a_loss_without_bound(trains_hidden: bool, backend: Backend, device: torch.device) -> None:
    """A loss scale that overflows: rows without a loss have a gradient of zero all the same."""
    hidden, weight = torch.randn(3, 4).to(device).requires_grad_(trains_hidden), torch.randn(7, 4).to(device)
    u, b = torch.randn(3, 2).to(device).requires_grad_(), torch.randn(7, 2).to(device)
    labels = torch.tensor([1, IGNORED, 2]).to(device)
    loss = linear_cross_entropy(hidden, weight, labels, low_rank=LowRank(u, b, 2.0), backend=backend)
    loss.backward(torch.tensor(float("inf"), device=device))
    for leaf in (u, hidden) if trains_hidden else (u,):
        assert (leaf.grad[1] == 0).all()
        assert not leaf.grad[0].isfinite().any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("steps", [(), (("mul", 0.0625),), (("div", 8.0),), (("mul", 0.1),), EPILOGUES["softcap"][:3]])
def test_infinite_logits(steps: tuple[EpilogueStep, ...], value: float, backend: Backend, device: torch.device) -> None:
    """A bias of -inf on padding words, or a half-precision logit that overflows below a soft cap."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 16).to(device), torch.randn(10, 16).to(device)
    bias, labels = torch.zeros(10, device=device), torch.tensor([1, 2, 3, IGNORED], device=device)
    bias[9] = value

    def run(function: Callable[..., Tensor], **extra: Any) -> list[Tensor]:
        return differentiate(
            lambda h, w, b: function(h, w, labels, bias=b, epilogue=steps, **extra), 1.0, hidden, weight, bias
        )

    for mine, theirs in zip(run(linear_cross_entropy, backend=backend), run(stock), strict=True):
        # Where the loss is nan stock has nan in the gradients of ignored rows as well.
        torch.testing.assert_close(mine.where(theirs.isfinite(), 0.0), theirs.where(theirs.isfinite(), 0.0))
        assert theirs.isfinite().all() or not mine.isfinite().all()


@pytest.mark.parametrize("factors", [(0.0,), (1e-200, 1e-200)])
def test_a_factor_of_nothing(factors: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU computes bfloat16, gradients ahead, with its float32 product emulated."""
    monkeypatch.setattr(module, "_exact_ahead", lambda hidden: True)
    monkeypatch.setattr(logit_chunks, "product", lambda a, b, out: out.copy_(a.float() @ b.float()))
    hidden, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(9, 8, dtype=torch.bfloat16)
    labels, steps = torch.tensor([1, 2, 3, 4]), tuple(("mul", factor) for factor in factors)
    got = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, epilogue=steps), 1.0, hidden, weight)
    want = differentiate(lambda h, w: stock(h, w, labels, epilogue=steps), 1.0, hidden, weight)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0)


def test_class_weights_that_add_up_to_nothing(backend: Backend, device: torch.device) -> None:
    hidden, weight = torch.randn(2, 3).to(device), torch.randn(4, 3).to(device)
    labels, class_weight = torch.tensor([1, 2]).to(device), torch.tensor([1.0, 0.0, 0.0, 1.0]).to(device)
    for reduction in ("mean", "sum"):
        options: dict[str, Any] = {"class_weight": class_weight, "reduction": reduction}
        got = differentiate(
            lambda h, w, o=options: linear_cross_entropy(h, w, labels, backend=backend, **o), 1.0, hidden, weight
        )
        want = differentiate(lambda h, w, o=options: stock(h, w, labels, **o), 1.0, hidden, weight)
        for mine, reference in zip(got, want, strict=True):
            torch.testing.assert_close(mine, reference, equal_nan=True)


def test_gradient_of_a_loss_scale_does_not_underflow(backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/968: gradients made in the forward do not know the loss scale.

    The 8191 small probabilities of a row, over 16 rows, are below float16's smallest number; times 65536 they are not.
    """
    rows, vocabulary, scale = 16, 8192, 65536.0
    rows = 4 if interpreted(backend, device) else rows
    hidden = torch.zeros(rows, 2, dtype=torch.float16, device=device)
    hidden[:, 0] = 1.0
    weight = torch.zeros(vocabulary, 2, dtype=torch.float16, device=device)
    weight[:, 0], weight[0, 0] = -9.0, 6.0
    labels = torch.zeros(rows, dtype=torch.int64, device=device)
    options: dict[str, Any] = {"epilogue": EPILOGUES["cast"]}
    got = differentiate(
        lambda h, w: linear_cross_entropy(h, w, labels, backend=backend, **options), scale, hidden, weight
    )
    want = differentiate(lambda h, w: oracle(h, w, labels, **options), scale, hidden.double(), weight.double())
    assert (got[2][:, 0] != 0).all()
    for mine, reference in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_backward_twice_gives_the_same_bits_and_writes_nothing_of_the_callers(
    dtype: torch.dtype, reduction: Reduction, backend: Backend, device: torch.device
) -> None:
    hidden = torch.randn(6, 3).to(device, dtype).requires_grad_()
    weight = torch.randn(70, 3).to(device, dtype).requires_grad_()
    term = LowRank(*(torch.randn(n, 2).to(device).requires_grad_() for n in (6, 70)), 0.3)
    operands = (hidden, weight, term.u, term.b)
    labels = draw_labels(6, 70).to(device)
    class_weight = torch.rand(70).to(device)
    kept = [t.detach().clone() for t in (*operands, labels, class_weight)]
    options: dict[str, Any] = {"class_weight": class_weight, "label_smoothing": 0.1, "reduction": reduction}
    loss = linear_cross_entropy(hidden, weight, labels, low_rank=term, backend=backend, **options)
    grad_output = torch.full((1,), 0.37, dtype=loss.dtype, device=device).expand(6)
    grad_output = grad_output if reduction == "none" else grad_output[0]
    first = torch.autograd.grad(loss, operands, grad_output, retain_graph=True)
    second = torch.autograd.grad(loss, operands, grad_output, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, (*operands, labels, class_weight), strict=True))
    assert (grad_output == torch.tensor(0.37, dtype=loss.dtype)).all()


def test_logits_of_minus_infinity(backend: Backend, device: torch.device) -> None:
    """A vocabulary whose unused tokens are masked away, in whole blocks of it and at its start."""
    hidden, weight = torch.randn(3, 4).to(device), torch.randn(20000, 4).to(device)
    bias = torch.zeros(20000, device=device)
    bias[:9000] = bias[15000:] = float("-inf")
    labels = torch.tensor([9001, 14999, IGNORED]).to(device)
    got = differentiate(
        lambda h, w: linear_cross_entropy(h, w, labels, bias=bias, backend=backend), 1.0, hidden, weight
    )
    want = differentiate(lambda h, w: stock(h, w, labels, bias=bias), 1.0, hidden, weight)
    for mine, reference in zip(got, want, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7)


def test_not_finite_logits_do_not_give_a_finite_loss(backend: Backend, device: torch.device) -> None:
    weight = torch.randn(70, 4).to(device)
    labels = torch.tensor([1, 2]).to(device)
    for value in (float("nan"), float("inf")):
        hidden = torch.ones(2, 4, device=device)
        hidden[0, 0] = value
        loss = linear_cross_entropy(hidden, weight, labels, reduction="none", backend=backend)
        assert loss.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("label", [70, -1, 2**40])
def test_labels_out_of_range_raise_as_without_fusion(label: int, backend: Backend) -> None:
    hidden, weight, labels = torch.randn(3, 4), torch.randn(70, 4), torch.tensor([1, label, IGNORED])
    with pytest.raises(IndexError) as expected:
        stock(hidden, weight, labels)
    for max_valid in (None, 2):
        with pytest.raises(IndexError) as raised:
            linear_cross_entropy(hidden, weight, labels, max_valid=max_valid, backend=backend)
        assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_reach_inside(cast: torch.dtype, backend: Backend, device: torch.device) -> None:
    """https://github.com/linkedin/Liger-Kernel/issues/501: some operands were autocast and others were not."""
    hidden, weight = torch.randn(6, 8).to(device), torch.randn(70, 8).to(device)
    labels = draw_labels(6, 70, ignored=0.2).to(device)
    for reduction in ("mean", "none"):

        def call(h: Tensor, w: Tensor, reduction: Reduction = reduction) -> Tensor:
            return linear_cross_entropy(h, w, labels, reduction=reduction, backend=backend)

        outside = differentiate(call, 1.0, hidden, weight)
        with torch.autocast(device.type, dtype=cast):
            inside = differentiate(call, 1.0, hidden, weight)
        assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_are_those_of_stock(dtype: torch.dtype, backend: Backend, device: torch.device) -> None:
    operands = [torch.randn(6, 3).to(device, dtype), torch.randn(70, 3).to(device, dtype)]
    labels = draw_labels(6, 70).to(device)
    for reduction, epilogue in itertools.product(("mean", "none"), ((), EPILOGUES["cast"])):
        options: dict[str, Any] = {"reduction": reduction, "epilogue": epilogue}
        got = differentiate(
            lambda h, w, o=options: linear_cross_entropy(h, w, labels, backend=backend, **o), 1.0, *operands
        )
        want = differentiate(lambda h, w, o=options: stock(h, w, labels, **o), 1.0, *operands)
        assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want]


def test_float64_is_computed_in_float64(backend: Backend, device: torch.device) -> None:
    operands = [torch.randn(6, 3, dtype=torch.float64, device=device) for _ in range(1)]
    operands.append(torch.randn(70, 3, dtype=torch.float64, device=device))
    labels = draw_labels(6, 70, ignored=0.2).to(device)
    got = differentiate(lambda h, w: linear_cross_entropy(h, w, labels, backend=backend), 1.0, *operands)
    for mine, reference in zip(got, differentiate(lambda h, w: oracle(h, w, labels), 1.0, *operands), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("term", [torch.bfloat16, torch.float32], ids=str)
def test_logits_with_a_low_rank_term_never_exist_as_a_whole(term: torch.dtype, device: torch.device) -> None:
    count, vocabulary, budget = 512, 4096, 2**18
    hidden = torch.randn(count, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 8, device=device, dtype=torch.bfloat16)
    u, b = (torch.randn(n, 4, device=device, dtype=term, requires_grad=True) for n in (count, vocabulary))
    labels = draw_labels(count, vocabulary).to(device)
    for reduction in ("mean", "none"):
        with Watch() as watch:
            options: dict[str, Any] = {"low_rank": LowRank(u, b, 2.0), "reduction": reduction, "chunk_bytes": budget}
            linear_cross_entropy(hidden, weight, labels, **options).sum().backward()
        assert watch.largest <= 2 * budget  # the rows in float32


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_logits_never_exist_as_a_whole(trainable: bool, device: torch.device) -> None:
    count, vocabulary, budget = 512, 4096, 2**18
    hidden = torch.randn(count, 8, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, 8, device=device, requires_grad=trainable)
    labels = draw_labels(count, vocabulary).to(device)
    for reduction in ("mean", "none"):
        with Watch() as watch:
            linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_bytes=budget).sum().backward()
        assert watch.largest <= budget  # the expanded views of nll_loss have a storage of one element


def test_refusals() -> None:
    hidden, weight, labels = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([1, 2, 3])
    with pytest.raises(TypeError, match=r"hidden torch\.bfloat16, weight torch\.float32"):
        linear_cross_entropy(hidden.bfloat16(), weight, labels)
    with pytest.raises(TypeError, match=r"bias torch\.float16"):
        linear_cross_entropy(hidden, weight, labels, bias=torch.randn(7).half())
    with pytest.raises(TypeError, match="int64"):
        linear_cross_entropy(hidden, weight, labels.int())
    with pytest.raises(TypeError, match="class_weight"):
        linear_cross_entropy(hidden, weight, labels, class_weight=torch.ones(7, dtype=torch.int64))
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, labels[:2])
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, torch.randn(7, 5), labels)
    for term in (
        LowRank(torch.randn(3, 2), torch.randn(7, 2).half(), 1.0),
        LowRank(*torch.ones(2, 3, 3).double(), 1.0),
    ):
        with pytest.raises(TypeError, match="low_rank is floating"):
            linear_cross_entropy(hidden, weight, labels, low_rank=term)
    for u, b in (((3, 2), (7, 1)), ((2, 2), (7, 2)), ((3, 2), (6, 2)), ((3,), (7, 2))):
        with pytest.raises(ValueError, match=r"u \[N, r\] and b \[V, r\] do not fit"):
            linear_cross_entropy(hidden, weight, labels, low_rank=LowRank(torch.randn(u), torch.randn(b), 1.0))
    with pytest.raises(ValueError, match="empty vocabulary"):
        linear_cross_entropy(hidden, torch.randn(0, 4), torch.full((3,), IGNORED))
    with pytest.raises(ValueError, match=r"class_weight is \[V\]"):
        linear_cross_entropy(hidden, weight, labels, class_weight=torch.ones(3))
    with pytest.raises(ValueError, match="reduction"):
        linear_cross_entropy(hidden, weight, labels, reduction="batchmean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label_smoothing"):
        linear_cross_entropy(hidden, weight, labels, label_smoothing=1.5)
    with pytest.raises(ValueError, match="chunk_bytes"):
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=0)
    with pytest.raises(ValueError, match="tanh"):
        linear_cross_entropy(hidden, weight, labels, epilogue=(("tanh", None), ("tanh", None)))
    with pytest.raises(ValueError, match="backend"):
        linear_cross_entropy(hidden, weight, labels, backend="cuda")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("max_valid", [None, 3000])
def test_never_waits_for_the_device(max_valid: int | None, backend: Backend, device: torch.device) -> None:
    hidden = torch.randn(4096, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.arange(4096, device=device) % 1000
    labels[3000:] = IGNORED

    def step() -> None:
        loss = linear_cross_entropy(
            hidden, weight, labels, reduction="sum", epilogue=EPILOGUES["cast"], max_valid=max_valid, backend=backend
        )
        (loss / 7).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [1, 257, 65535, 65536, 65537, 128256, 151936, 262208])
@pytest.mark.parametrize("count", [0, 1, 7, 4097])
def test_every_vocabulary_with_every_token_count(count: int, vocabulary: int, device: torch.device) -> None:
    torch.manual_seed(count + vocabulary)
    hidden, weight = torch.randn(count, 16, device=device), torch.randn(vocabulary, 16, device=device)
    labels = draw_labels(count, vocabulary).to(device)
    got = differentiate(
        lambda h, w: linear_cross_entropy(h, w, labels, reduction="sum", backend="triton"), 1.0, hidden, weight
    )
    stocks = differentiate(lambda h, w: stock(h, w, labels, reduction="sum"), 1.0, hidden, weight)
    want = differentiate(lambda h, w: oracle(h, w, labels, reduction="sum"), 1.0, hidden.double(), weight.double())
    assert_close_as_stock(got, stocks, want)


@pytest.mark.gpu
def test_more_logits_than_int32_counts(device: torch.device) -> None:
    """One chunk of 17,000 rows of 128,256 logits: 2.2e9 elements."""
    torch.manual_seed(0)
    hidden = torch.randn(17000, 8, device=device, dtype=torch.bfloat16)
    weight = torch.randn(128256, 8, device=device, dtype=torch.bfloat16)
    labels = torch.randint(128256, (17000,), device=device)

    def run(chunk_bytes: int) -> list[Tensor]:
        return differentiate(
            lambda h, w: linear_cross_entropy(h, w, labels, chunk_bytes=chunk_bytes, backend="triton"),
            1.0,
            hidden,
            weight,
        )

    for whole, chunked in zip(run(8 * 2**30), run(512 * 2**20), strict=True):
        torch.testing.assert_close(whole, chunked, rtol=2e-2, atol=1e-5)


@pytest.mark.gpu
def test_peak_memory(device: torch.device) -> None:
    """Beyond inputs and gradients: the chunk buffer, the float32 gradient of hidden, the float32 weight gradient."""
    count, width, vocabulary, budget = 4096, 512, 50304, 64 * 2**20
    hidden = torch.randn(count, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (count,), device=device)
    for trainable in (False, True):
        weight = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16, requires_grad=trainable)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=budget, backend="triton").backward()
        extra = torch.cuda.max_memory_allocated() - before
        accumulators = 4 * count * width + (6 * vocabulary * width if trainable else 0)
        assert extra <= budget + accumulators + 2 * count * width + 2**24
