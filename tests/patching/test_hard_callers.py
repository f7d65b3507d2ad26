"""Whatever is done with a patched model, its numbers are stock's, or one sentence says why not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from transformers import LlamaConfig, LlamaForCausalLM

import slothplug
from slothplug.patching.private_class import is_patched
from slothplug.patching.report import Report
from tests.patching.device import DEVICE

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator(DEVICE).manual_seed(1))
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attn_implementation": "eager",
}  # fmt: skip

Outcome = tuple[torch.Tensor, dict[str, torch.Tensor]]


def full() -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def lora() -> nn.Module:
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(full(), peft.LoraConfig(**options))


@pytest.fixture(params=[full, lora], ids=["full", "lora"])
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return request.param()

    return seeded


def one_layer(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Models of one layer: tracing takes seconds for each."""

    def shortened() -> nn.Module:
        torch.manual_seed(0)
        model = make()
        del core(model).model.layers[1]
        return model

    return shortened


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, Report]:
    """A patched model, a stock one, and the report."""
    model, stock = make(), make()
    report = slothplug.patch(model)
    assert not report.left
    return model, stock, report


def step(model: nn.Module, **inputs: Any) -> Outcome:
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": IDS, **inputs}).loss
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {name.removeprefix("_orig_mod."): parameter for name, parameter in model.named_parameters()}
    return {name: parameter.grad.clone() for name, parameter in named.items() if parameter.grad is not None}


def assert_same(got: Outcome, expected: Outcome, tolerance: float = 2e-5) -> None:
    assert got[1].keys() == expected[1].keys()
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance, equal_nan=True)
    for name, gradient in expected[1].items():
        assert got[1][name].dtype is gradient.dtype, name
        finite = gradient.isfinite()
        assert torch.equal(got[1][name].isfinite(), finite), name
        error = (got[1][name] - gradient)[finite].norm() / gradient[finite].norm().clamp_min(1e-6)
        assert error <= 5 * tolerance, f"{name}: {error:.1e}"


def reasons(report: Report) -> set[str]:
    return {reason for site in report.fused for reason in site.calls.fallbacks}


def core(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


# Recorders and transforms


def test_a_compiled_model() -> None:
    torch._dynamo.reset()
    model, stock, report = pair(one_layer(lora))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        assert_same(step(compiled), step(stock))
    assert counter.frame_count == 1
    assert {site.calls.served for site in report.fused} == {0}
    assert not reasons(report)
    assert_same(step(model), step(stock))
    torch._dynamo.reset()


def test_a_compiled_model_is_compiled_once_whatever_was_counted_in_between() -> None:
    torch._dynamo.reset()
    model, stock, _ = pair(one_layer(full))
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    step(compiled)
    graphs = counter.frame_count
    for _ in range(2):
        step(model)
        assert_same(step(compiled), step(stock))
    assert counter.frame_count == graphs
    torch._dynamo.reset()


def test_a_model_compiled_before_the_patch() -> None:
    torch._dynamo.reset()
    model, stock = one_layer(full)(), one_layer(full)()
    compiled = torch.compile(model, backend="eager")
    step(compiled)
    report = slothplug.patch(compiled)
    assert report.fused
    assert_same(step(compiled), step(stock))
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_model(make: Callable[[], nn.Module], strict: bool) -> None:
    model, stock, _ = pair(one_layer(make))
    inputs = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    exported = torch.export.export(model.eval(), (), inputs, strict=strict).module()
    torch.testing.assert_close(exported(**inputs).loss, stock.eval()(**inputs).loss)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_model(make: Callable[[], nn.Module]) -> None:
    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, use_cache=False, return_dict=False)[0]

    model, stock, report = pair(make)
    try:
        torch.jit.trace(Logits(stock.eval()), (IDS,), check_trace=False)
    except (IndexError, RuntimeError) as error:
        pytest.skip(f"transformers {transformers.__version__} cannot be traced unpatched: {error}")
    traced = torch.jit.trace(Logits(model.eval()), (IDS,), check_trace=False)
    torch.testing.assert_close(traced(IDS + 1), stock.eval()(input_ids=IDS + 1).logits)
    assert "traced by torch.jit" in reasons(report)


def test_functional_call_trains_the_tensors_that_it_is_given(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    outcomes = []
    for one in (model, stock):
        given = {name: (p.detach() * 1.1).requires_grad_(p.requires_grad) for name, p in one.named_parameters()}
        loss = torch.func.functional_call(one, given, (), {"input_ids": IDS, "labels": IDS}).loss
        loss.backward()
        assert not gradients(one)
        outcomes.append((loss.detach(), {name: p.grad for name, p in given.items() if p.grad is not None}))
    assert_same(*outcomes)
    assert not reasons(report)


def test_functional_gradients(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    outcomes = []
    for one in (model, stock):

        def loss(parameters: dict[str, torch.Tensor], one: nn.Module = one) -> torch.Tensor:
            return torch.func.functional_call(one, parameters, (), {"input_ids": IDS, "labels": IDS}).loss

        found, value = torch.func.grad_and_value(loss)({name: p.detach() for name, p in one.named_parameters()})
        outcomes.append((value, found))
    assert_same(*outcomes)
    assert "transformed by torch.func" in reasons(report)


def logits_of(model: nn.Module, **inputs: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda embedded: model(inputs_embeds=embedded, use_cache=False, **inputs).logits


def test_tangents_and_batches(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    x, tangent = torch.randn(2, 2, 5, 32)
    for got, expected in zip(
        *(torch.func.jvp(logits_of(one), (x,), (tangent,)) for one in (model, stock)), strict=True
    ):
        torch.testing.assert_close(got, expected)
    many, mask = torch.randn(3, 2, 5, 32), torch.zeros(2, 1, 5, 5)
    got, expected = (torch.func.vmap(logits_of(one, attention_mask=mask))(many) for one in (model, stock))
    torch.testing.assert_close(got, expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        got, expected = (
            forward_ad.unpack_dual(one(inputs_embeds=dual, labels=IDS[:, :5]).loss).tangent for one in (model, stock)
        )
        assert expected is not None
        torch.testing.assert_close(got, expected)
    assert {"transformed by torch.func", "inside a forward-mode derivative"} <= reasons(report)


@pytest.mark.parametrize("labels", [True, False], ids=["loss", "logits"])
def test_a_second_derivative_is_refused(make: Callable[[], nn.Module], labels: bool) -> None:
    """Torch's own guard lets the second derivative of a loss through, without the kernels' part of it."""
    model, stock, _ = pair(make)
    for one in (stock, model):
        trained = [parameter for parameter in one.parameters() if parameter.requires_grad]
        output = one(input_ids=IDS, labels=IDS if labels else None)
        value = output.loss if labels else output.logits.square().mean()
        if one is model:
            with pytest.raises(RuntimeError, match=r"no second derivative.*slothplug\.unpatch\(model\)"):
                torch.autograd.grad(value, trained, create_graph=True)
        else:
            first = torch.autograd.grad(value, trained, create_graph=True)
            torch.autograd.grad(sum(gradient.square().sum() for gradient in first), trained)
    assert_same(step(model), step(stock))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_saved_tensor_hooks_and_retained_graphs(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    expected = step(stock)
    with torch.autograd.set_detect_anomaly(True):
        assert_same(step(model), expected)
    with torch.autograd.graph.save_on_cpu():
        assert_same(step(model), expected)
    loss = model(input_ids=IDS, labels=IDS).loss
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first, second = (torch.autograd.grad(loss, trained, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not reasons(report)


def test_nothing_of_a_call_waits_for_the_cycle_collector(make: Callable[[], nn.Module]) -> None:
    model, _, _ = pair(make)
    hidden: list[Any] = []
    core(model).model.norm.register_forward_hook(lambda module, args, output: hidden.append(weakref.ref(output)))
    gc.disable()
    try:
        step(model)
        model(input_ids=IDS, labels=IDS).logits.sum()
        model(input_ids=IDS)
        assert [reference() for reference in hidden] == [None] * 3
    finally:
        gc.enable()


# Copies, threads, exceptions, hooks


def replica(model: nn.Module) -> nn.Module:
    """A copy as ``nn.DataParallel`` makes it: children are replicas, parameters plain attributes in the graph."""
    made = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copied in made.items():
        copied._former_parameters = {}
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else made[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                copied._parameters[name] = None
            else:
                setattr(copied, name, parameter.clone())
                copied._former_parameters[name] = getattr(copied, name)
    return made[model]


def test_replicas_of_data_parallel(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    loss = replica(model)(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert_same((loss.detach(), gradients(model)), step(stock))
    norms = [site for site in report.fused if site.op == "rms_norm"]
    assert [(site.calls.served, dict(site.calls.fallbacks)) for site in norms] == [(1, {})] * 5


def test_threads_call_one_model_at_once(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    batches = [IDS.roll(shift, 1) for shift in range(4)]

    def outcome(one: nn.Module, ids: torch.Tensor) -> Outcome:
        trained = {name: parameter for name, parameter in one.named_parameters() if parameter.requires_grad}
        loss = one(input_ids=ids, labels=ids).loss
        return loss.detach(), dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))

    found: dict[int, list[Outcome]] = {index: [] for index in range(4)}

    def work(index: int) -> None:
        found[index] += [outcome(model, batches[index]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, batch in enumerate(batches):
        expected = outcome(stock, batch)
        assert len(found[index]) == 3
        for got in found[index]:
            assert_same(got, expected)
    assert not reasons(report)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_call_after_an_exception(make: Callable[[], nn.Module], where: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("inside")

    model, stock, report = pair(make)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    broken = core(model).model.layers[1].register_forward_pre_hook(fail)
    if where == "backward":
        broken.remove()
        broken = trained[0].register_hook(fail)
    with pytest.raises(ValueError, match="inside"):
        step(model)
    broken.remove()
    assert_same(step(model), step(stock))
    assert len(reasons(report)) <= 1  # siblings that the first call computed and nobody asked for


def test_hooks_on_every_module_and_parameter(make: Callable[[], nn.Module]) -> None:
    model, stock, _ = pair(make)
    calls: list[list[str]] = []
    arrived: list[dict[str, list[torch.Tensor]]] = []
    for one in (model, stock):
        calls.append([])
        arrived.append({})
        for name, module in one.named_modules():

            def forward(module: Any, args: Any, output: Any, name: str = name, seen: Any = calls[-1]) -> None:
                seen.append(name)

            def backward(module: Any, into: Any, out: Any, name: str = name, seen: Any = arrived[-1]) -> None:
                seen[name] = [g.clone() for g in (*into, *out) if g is not None]

            module.register_forward_hook(forward)
            if not list(module.children()) or name.endswith(("mlp", "self_attn")):
                module.register_full_backward_hook(backward)
        for name, parameter in one.named_parameters():
            if parameter.requires_grad:

                def gradient(grad: torch.Tensor, name: str = name, seen: Any = arrived[-1]) -> torch.Tensor:
                    seen[f"{name}.grad"] = [grad.clone()]
                    return grad * 2

                parameter.register_hook(gradient)
    assert_same(step(model), step(stock))
    assert calls[0] == calls[1]
    assert arrived[0].keys() == arrived[1].keys()
    for name, expected in arrived[1].items():
        for got, tensor in zip(arrived[0][name], expected, strict=True):
            torch.testing.assert_close(got, tensor, rtol=1e-3, atol=1e-5, msg=name)


# Changes after the patch


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2), (torch.float64, 1e-6)], ids=str
)
def test_a_dtype_changed_after_the_patch(make: Callable[[], nn.Module], dtype: torch.dtype, tolerance: float) -> None:
    model, stock, report = pair(make)
    assert_same(step(model.to(dtype)), step(stock.to(dtype)), tolerance)
    assert bool(reasons(report)) == (dtype is torch.float64)
    assert_same(step(model.float()), step(stock.float()), tolerance)


def test_a_float64_model_is_left_with_the_reason(make: Callable[[], nn.Module]) -> None:
    model, stock = make().double(), make().double()
    with pytest.warns(slothplug.NothingFusedWarning):
        report = slothplug.patch(model)
    assert {s.reason for s in report.left if s.op in ("rms_norm", "glu", "rotary", "lora")} == {
        f"no kernel for {DEVICE} and torch.float64"
    }
    assert_same(step(model), step(stock), 1e-6)


def test_weights_tied_and_embeddings_resized_after_the_patch() -> None:
    model, stock, report = pair(full)
    for one in (model, stock):
        core(one).lm_head.weight = core(one).model.embed_tokens.weight
    assert_same(step(model), step(stock))
    for one in (model, stock):
        torch.manual_seed(5)
        one.resize_token_embeddings(80)
    assert_same(step(model), step(stock))
    assert not reasons(report)
    again = slothplug.patch(model)
    assert not again.left
    assert_same(step(model), step(stock))
    again.undo()
    assert not any(is_patched(module) for module in model.modules())


def test_requires_grad_toggled_after_the_patch(make: Callable[[], nn.Module]) -> None:
    model, stock, report = pair(make)
    for trained in ("q_proj", "norm", "embed", "lm_head", "mlp"):
        for one in (model, stock):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(trained in name)
        assert_same(step(model), step(stock))
    for one in (model, stock):
        one.requires_grad_(False)
    got, expected = (one(input_ids=IDS, labels=IDS).loss for one in (model, stock))
    assert not got.requires_grad
    torch.testing.assert_close(got, expected)
    assert not reasons(report)


# Inputs


@pytest.mark.parametrize("shape", [(0, 12), (2, 0), (2, 1), (1, 2)], ids=str)
def test_empty_and_shortest_batches(make: Callable[[], nn.Module], shape: tuple[int, int]) -> None:
    model, stock, _ = pair(make)
    ids = IDS[: shape[0], : shape[1]]
    outcomes: list[Any] = []
    for one in (model, stock):
        try:
            outcomes.append(step(one, input_ids=ids, labels=ids))
        except RuntimeError as error:
            outcomes.append(str(error))
    if isinstance(outcomes[1], str):
        assert outcomes[0] == outcomes[1]
    else:
        assert_same(*outcomes)


def test_nan_and_infinite_inputs_stay_visible(make: Callable[[], nn.Module]) -> None:
    model, stock, _ = pair(make)
    outcomes = []
    for one in (model, stock):
        embedded = one.get_input_embeddings()(IDS).detach().clone()
        embedded[0, 5, 3], embedded[1, 2, 0] = float("nan"), float("inf")
        logits = one(inputs_embeds=embedded).logits
        outcomes.append((step(one, input_ids=None, inputs_embeds=embedded), logits))
    assert_same(outcomes[0][0], outcomes[1][0])
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], equal_nan=True)
    assert outcomes[0][1].isnan().any()


def test_a_row_that_is_all_padding(make: Callable[[], nn.Module]) -> None:
    model, stock, _ = pair(make)
    mask = torch.ones_like(IDS)
    mask[0] = 0
    assert_same(step(model, attention_mask=mask), step(stock, attention_mask=mask))


def test_inference_mode_then_training(make: Callable[[], nn.Module]) -> None:
    model, stock, _ = pair(make)
    with torch.inference_mode():
        got, expected = (one(input_ids=IDS, labels=IDS) for one in (model, stock))
        torch.testing.assert_close(got.loss, expected.loss)
        torch.testing.assert_close(got.logits + 0, expected.logits)
    assert_same(step(model), step(stock))


def test_fake_tensors_go_to_the_original_forwards(make: Callable[[], nn.Module]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, _, report = pair(make)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids = mode.from_tensor(IDS)
        assert model(input_ids=ids, labels=ids, use_cache=False).loss.shape == ()
    assert "input of type FakeTensor" in reasons(report)


@pytest.mark.parametrize("values", [torch.complex64, torch.int32], ids=str)
def test_weights_that_no_kernel_takes(values: torch.dtype) -> None:
    """A norm whose weight becomes something else computes what stock does, and the report says why."""
    model, stock, report = pair(full)
    for one in (model, stock):
        weight = core(one).model.norm.weight
        core(one).model.norm.weight = nn.Parameter(weight.detach().round().to(values), requires_grad=False)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(model.model.norm(x), stock.model.norm(x))
    assert reasons(report) == {f"input of torch.float32, weight of {values}"}
    slothplug.unpatch(model)
    slothplug.patch(model)
    torch.testing.assert_close(model.model.norm(x), stock.model.norm(x))


# Generation


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"do_sample": True, "top_k": 5},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
def test_generation(make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    model, stock, report = pair(make)
    tokens = []
    for one in (model, stock):
        torch.manual_seed(4)
        prompt = IDS[:1] if "prompt_lookup_num_tokens" in options else IDS
        tokens.append(one.eval().generate(input_ids=prompt, max_new_tokens=6, **{"do_sample": False, **options}))
    assert torch.equal(*tokens)
    assert reasons(report) == {"called without labels"}


def test_a_left_padded_batch_answers_as_each_prompt_alone(make: Callable[[], nn.Module]) -> None:
    """https://github.com/unslothai/unsloth/issues/3699: one position for all rows, and the mask lost after prefill."""
    model, stock, _ = pair(make)
    ids, mask = IDS[:, :9].clone(), torch.ones_like(IDS[:, :9])
    ids[0, :6] = mask[0, :6] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    got, expected = (one.eval().generate(input_ids=ids, attention_mask=mask, **options) for one in (model, stock))
    assert torch.equal(got, expected)
    alone = [model.generate(input_ids=ids[:1, 6:], **options), model.generate(input_ids=ids[1:], **options)]
    assert torch.equal(torch.stack([alone[0][0, 3:], alone[1][0, 9:]]), got[:, 9:])
    shortest = [one.generate(input_ids=ids[1:, :1], **options) for one in (model, stock)]
    assert torch.equal(*shortest)


def test_decoding_token_by_token(make: Callable[[], nn.Module]) -> None:
    model, stock, _ = pair(make)
    with torch.no_grad():
        output = model.eval()(input_ids=IDS[:, :8], use_cache=True)
        logits = [output.logits]
        for at in range(8, 12):
            output = model(input_ids=IDS[:, at : at + 1], past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits)
        torch.testing.assert_close(torch.cat(logits, 1), stock.eval()(input_ids=IDS).logits)


# Devices and offloading


@pytest.mark.parametrize("layer", [0, 1])
def test_a_model_partly_on_meta_is_served_where_its_weights_are(make: Callable[[], nn.Module], layer: int) -> None:
    model = make()
    core(model).model.layers[layer].to("meta")
    report = slothplug.patch(model)
    assert {site.reason.removeprefix("Linear in it: ") for site in report.left} == {
        "its weights are on the meta device"
    }
    assert {f".{layer}." in site.name for site in report.left} == {True}
    assert {f".{1 - layer}." in site.name or "norm" in site.name or "head" in site.name for site in report.fused} == {
        True
    }


def test_embeddings_on_meta_do_not_keep_the_rest_from_being_served(make: Callable[[], nn.Module]) -> None:
    model = make()
    core(model).model.embed_tokens.to("meta")
    assert not slothplug.patch(model).left


def test_offloading_by_accelerate_before_and_after_the_patch(make: Callable[[], nn.Module]) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, stock, _ = pair(make)
    before = make()
    accelerate.cpu_offload(before, execution_device=torch.device("cpu"))
    with pytest.warns(slothplug.NothingFusedWarning):
        report = slothplug.patch(before)
    assert not report.fused
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with torch.no_grad():
        expected = stock(input_ids=IDS, labels=IDS)
        for one in (before, model):
            got = one(input_ids=IDS, labels=IDS)
            torch.testing.assert_close(got.loss, expected.loss)
            torch.testing.assert_close(one(input_ids=IDS).logits, expected.logits)


# Saving


def test_saved_files_are_stocks_and_load_patched(make: Callable[[], nn.Module], tmp_path: Any) -> None:
    model, stock, _ = pair(make)
    for name, one in (("fast", model), ("stock", stock)):
        one.save_pretrained(tmp_path / name)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("fast", "stock")]
    assert files[0].keys() == files[1].keys()
    assert all(files[0][name] == content for name, content in files[1].items() if name != "README.md")
    if isinstance(model, peft.PeftModel):
        loaded = peft.PeftModel.from_pretrained(full(), tmp_path / "fast", is_trainable=True)
    else:
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "fast", attn_implementation="eager").train()
    assert not any(is_patched(module) for module in loaded.modules())
    slothplug.patch(loaded)
    assert_same(step(loaded), step(stock))


def test_merged_and_unloaded_adapters() -> None:
    model, stock, _ = pair(lora)
    merged = [one.merge_and_unload() for one in (model, stock)]
    with torch.no_grad():
        torch.testing.assert_close(*(one(input_ids=IDS).logits for one in merged))
    for one in merged:
        one.requires_grad_(True)
    assert_same(step(merged[0]), step(merged[1]))
    slothplug.unpatch(merged[0])
    assert not any(is_patched(module) for module in merged[0].modules())


def _scaled_everywhere(module: nn.Module, arguments: Any, output: Any) -> Any:
    return output * 1.5 if isinstance(module, nn.SiLU) else None


def test_a_hook_on_every_module_is_heard_by_an_activation() -> None:
    def loss(patched: bool) -> torch.Tensor:
        model = full()
        if patched:
            slothplug.patch(model)
        handle = nn.modules.module.register_module_forward_hook(_scaled_everywhere)
        try:
            found: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
        finally:
            handle.remove()
        return found

    torch.testing.assert_close(loss(patched=True), loss(patched=False))


def test_a_verdict_is_not_kept_for_a_class_with_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    slothplug.patch(lora())
    forward = peft.tuners.lora.Linear.forward
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda self, *a, **k: forward(self, *a, **k) * 1.5)
    stock, model = lora(), lora()
    report = slothplug.patch(model)
    assert not [site for site in report.fused if site.op == "lora"]
    torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, stock(input_ids=IDS, labels=IDS).loss)
    monkeypatch.undo()
    assert [site for site in slothplug.patch(lora()).fused if site.op == "lora"]


def _replace_data(model: nn.Module) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data * 0.5


@pytest.mark.parametrize("change", [_replace_data, lambda model: model.to(torch.bfloat16)], ids=[".data", "to"])
def test_logits_of_weights_that_were_replaced_are_refused(change: Callable[[nn.Module], object]) -> None:
    model = full()
    slothplug.patch(model)
    with torch.no_grad():
        output = model(input_ids=IDS, labels=IDS)
    change(model)
    with pytest.raises(slothplug.StaleLogitsError, match=r"written or replaced.*keep_logits: true"):
        output.logits.sum()
