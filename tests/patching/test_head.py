"""The output head of whole models: who takes the fused loss, who reads logits, and that both get stock's numbers."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import slothplug
from slothplug.errors import NothingFusedError, StaleLogitsError
from slothplug.patching import deferred
from slothplug.patching.report import SiteReport
from tests.patching.device import DEVICE, cpu_only

IDS = (torch.arange(48).view(2, 24) * 7) % 120 + 4
LABELS = IDS.clone()
LABELS[:, :5] = -100
LABELS[1, -3:] = -100


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(kind: str = "llama", seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny random causal LM of a model type, with weights large enough for the loss to be far from uniform."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "gpt2":
        sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
                 "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**{**sizes, **changes}))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.float().train()


def head_of(report: slothplug.Report) -> SiteReport:
    (site,) = [site for site in report.sites if site.op == "head"]
    return site


def patched(model: nn.Module, **settings: Any) -> SiteReport:
    """Patches the head alone, so that nothing but the head can differ from stock."""
    return head_of(slothplug.patch(model, {"ops": ["head"], **settings}))


def step(model: nn.Module, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**{"input_ids": IDS, "labels": LABELS, **inputs}).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Any, expected: Any) -> None:
    assert got[1].keys() == expected[1].keys()
    torch.testing.assert_close(got[0], expected[0], rtol=1e-6, atol=1e-6, equal_nan=True)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            got[1][name], gradient, rtol=1e-4, atol=2e-6 * max(1.0, gradient.abs().max().item()), msg=name
        )


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "phi (head bias)": ("phi", {}),
    "gemma2 (soft-cap)": ("gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "cohere (scale)": ("cohere", {"logit_scale": 0.0625}),
    "granite (divisor)": ("granite", {"logits_scaling": 8.0}),
    "mixtral (auxiliary loss)": ("mixtral", {"num_local_experts": 4, "output_router_logits": True}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    "falcon_h1 (multiplier)": (
        "falcon_h1",
        {"lm_head_multiplier": 0.5, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    ),
}


@pytest.mark.parametrize(("kind", "changes"), ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_architectures_train_on_the_fused_loss_with_stock_numbers(kind: str, changes: dict[str, Any]) -> None:
    # https://github.com/unslothai/unsloth/pull/11277
    model, stock = make(kind, **changes), make(kind, **changes)
    head = patched(model)
    assert_same(step(model), step(stock))
    assert head.calls.served == 1
    assert not head.calls.fallbacks
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, stock(input_ids=IDS).logits)


def test_a_model_with_the_loss_inside_its_forward_is_served() -> None:
    def bart() -> nn.Module:
        sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
        sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
        sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
        return make("bart", d_model=32, dropout=0.0, decoder_start_token_id=2, is_decoder=True, **sizes)

    model, stock = bart(), bart()
    head = patched(model)
    assert_same(step(model), step(stock))
    assert head.calls.served == 1


@pytest.mark.parametrize(
    "count",
    [31, torch.tensor(31), torch.tensor([31]), torch.tensor(31, dtype=torch.int32), torch.tensor(31.0)],
    ids=str,
)
def test_the_count_that_was_passed_is_the_divisor(count: Any) -> None:
    # https://github.com/linkedin/Liger-Kernel/issues/802, https://github.com/huggingface/transformers/pull/46204
    model, stock = make(), make()
    patched(model)
    got, expected = step(model, num_items_in_batch=count), step(stock, num_items_in_batch=count)
    assert_same(got, expected)
    assert got[0].shape == expected[0].shape


def test_accumulated_micro_batches_give_the_gradient_of_the_batch() -> None:
    # https://github.com/linkedin/Liger-Kernel/issues/802
    model, stock = make(), make()
    patched(model)
    ids = torch.randint(4, 120, (8, 12), generator=torch.Generator(DEVICE).manual_seed(0))
    labels = torch.full_like(ids, -100)
    for row, supervised in enumerate((3, 11, 1, 9, 2, 7, 0, 5)):
        labels[row, 12 - supervised :] = ids[row, 12 - supervised :]
    count = (labels[:, 1:] != -100).sum()
    stock(input_ids=ids, labels=labels, num_items_in_batch=count).loss.backward()
    for rows in range(0, 8, 2):
        micro = {"input_ids": ids[rows : rows + 2], "labels": labels[rows : rows + 2]}
        model(**micro, num_items_in_batch=count).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("count", [None, 17])
def test_a_batch_without_supervised_tokens(count: int | None) -> None:
    # https://github.com/linkedin/Liger-Kernel/issues/177
    model, stock = make(), make()
    patched(model)
    labels = torch.full_like(IDS, -100)
    got, expected = (
        step(model, labels=labels, num_items_in_batch=count),
        step(stock, labels=labels, num_items_in_batch=count),
    )
    torch.testing.assert_close(got[0], expected[0], equal_nan=True)
    assert got[1].keys() == expected[1].keys()
    if count is not None:
        assert got[0] == 0
        assert all(gradient.count_nonzero() == 0 for gradient in got[1].values())


def test_labels_that_are_already_shifted_are_used_as_they_are() -> None:
    # https://github.com/huggingface/transformers/pull/36607
    model, stock = make(), make()
    head = patched(model)
    shifted = F.pad(LABELS, (0, 1), value=-100)[..., 1:].contiguous()
    assert_same(step(model, shift_labels=shifted), step(stock, shift_labels=shifted))
    assert head.calls.served == 1


@pytest.mark.parametrize("keep", [10, torch.arange(14, 24)], ids=["last", "positions"])
def test_logits_to_keep(keep: Any) -> None:
    model, stock = make(), make()
    head = patched(model)
    inputs = {"labels": LABELS[:, -10:], "logits_to_keep": keep}
    assert_same(step(model, **inputs), step(stock, **inputs))
    assert head.calls.served == 1


@cpu_only  # on CUDA stock and we fail an assertion on the device, after which the process can do nothing
def test_a_label_out_of_range_gives_the_error_of_stock() -> None:
    model, stock = make(), make()
    patched(model)
    wrong = LABELS.clone()
    wrong[0, 9] = 128
    for each in (model, stock):
        with pytest.raises(IndexError, match="128 is out of bounds"):
            each(input_ids=IDS, labels=wrong)


@pytest.mark.parametrize("scale", [0.3, 65536.0])
def test_a_loss_scale_scales_the_gradient(scale: float) -> None:
    # https://github.com/linkedin/Liger-Kernel/issues/968
    gradients = []
    for model in (make(), make()):
        if not gradients:
            patched(model)
        (model(input_ids=IDS, labels=LABELS).loss * scale).backward()
        gradients.append({name: p.grad / scale for name, p in model.named_parameters()})
    assert_same((torch.zeros(()), gradients[0]), (torch.zeros(()), gradients[1]))


@pytest.mark.parametrize("frozen", ["head", "body", "all but the head's input"])
def test_frozen_parts(frozen: str) -> None:
    # https://github.com/linkedin/Liger-Kernel/issues/930
    def build() -> nn.Module:
        model = make()
        for name, parameter in model.named_parameters():
            trains = {"head": "lm_head" not in name, "body": "lm_head" in name}.get(frozen, "model.norm" in name)
            parameter.requires_grad_(trains)
        return model

    model, stock = build(), build()
    head = patched(model)
    assert_same(step(model), step(stock))
    assert head.calls.served == 1


# Dtypes


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "pure"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_and_autocast(dtype: torch.dtype, autocast: bool) -> None:
    # https://github.com/linkedin/Liger-Kernel/issues/501
    if dtype is torch.float32 and not autocast:
        pytest.skip("every other test here")
    model, stock = make().to(dtype), make().to(dtype)
    head = patched(model)
    results = []
    for each in (model, stock):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            output = each(input_ids=IDS, labels=LABELS)
        output.loss.backward()
        results.append((output, {name: p.grad for name, p in each.named_parameters()}))
    (got, ours), (expected, theirs) = results
    assert got.loss.dtype is expected.loss.dtype
    assert got.logits.dtype is expected.logits.dtype
    torch.testing.assert_close(got.loss, expected.loss, rtol=2e-3, atol=2e-3)
    for name, gradient in theirs.items():
        assert ours[name].dtype is gradient.dtype
        error = (ours[name] - gradient).float().norm() / gradient.float().norm()
        assert error < 2e-2, f"{name}: {error}"
    assert head.calls.served == 1
    assert not head.calls.fallbacks
    assert torch.equal(got.logits.detach() + 0, expected.logits.detach()), "read outside the autocast region"


# Who reads the logits


def test_what_leaves_the_model_is_the_logits() -> None:
    # https://github.com/unslothai/unsloth/issues/3126
    model, stock = make(), make()
    head = patched(model)
    output, expected = model(input_ids=IDS, labels=LABELS), stock(input_ids=IDS, labels=LABELS)
    assert isinstance(output.logits, torch.Tensor)
    assert output.logits.shape == (2, 24, 128)
    assert torch.equal(output.logits.argmax(-1), expected.logits.argmax(-1))
    assert not head.calls.fallbacks
    for loss in (output.loss + output.logits.square().mean(), expected.loss + expected.logits.square().mean()):
        loss.backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert torch.equal(output.logits + 0, expected.logits)
    assert dict(head.calls.fallbacks) == {"logits were read by pow": 1}


def test_without_labels_the_head_is_stock() -> None:
    model, stock = make(), make()
    head = patched(model)
    logits = model(input_ids=IDS).logits
    assert type(logits) is torch.Tensor
    assert torch.equal(logits, stock(input_ids=IDS).logits)
    assert torch.equal(
        model.generate(IDS[:1, :4], max_new_tokens=4, do_sample=False),
        stock.generate(IDS[:1, :4], max_new_tokens=4, do_sample=False),
    )
    assert head.calls.served == 0
    assert set(head.calls.fallbacks) == {"called without labels"}


def test_a_loss_function_that_reads_is_stock_and_real_when_the_call_ends() -> None:
    def reader(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).mean()

    def nothing(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return torch.zeros((), requires_grad=True)

    for function in (reader, nothing):
        model, stock = make(), make()
        model.loss_function = stock.loss_function = function
        head = patched(model)
        results = []
        for each in (model, stock):
            with torch.autocast(DEVICE, torch.bfloat16):
                output = each(input_ids=IDS, labels=LABELS)
            results.append(output)
            assert head.calls.served == 0
            assert head.calls.fallbacks.total() == 1
            (output.loss + output.logits.float().exp().mean()).backward()
        assert torch.equal(results[0].loss, results[1].loss)
        for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode: Callable[[], Any]) -> None:
    # https://github.com/huggingface/trl/pull/5069
    model, stock = make().eval(), make().eval()
    head = patched(model)
    with mode():
        got, expected = model(input_ids=IDS, labels=LABELS), stock(input_ids=IDS, labels=LABELS)
        torch.testing.assert_close(got.loss, expected.loss)
        assert head.calls.served == 1
        assert not head.calls.fallbacks
        assert not got.loss.requires_grad
        assert torch.equal(got.logits + 0, expected.logits)


def test_reading_after_the_head_was_trained_is_refused() -> None:
    model = make()
    patched(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    output = model(input_ids=IDS, labels=LABELS)
    output.loss.backward()
    optimizer.step()
    with pytest.raises(StaleLogitsError, match="keep_logits: true"):
        output.logits.softmax(-1)


def step_counters() -> list[Any]:
    return [hook for hook in _global_optimizer_post_hooks.values() if isinstance(hook, deferred._StepCounter)]


def test_the_hook_on_optimizer_steps_serves_an_undone_model_and_holds_none() -> None:
    model = make()
    report = slothplug.patch(model)
    output = model(input_ids=IDS, labels=LABELS)
    report.undo()
    (counter,) = step_counters()
    output.loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer.step()
    with pytest.raises(StaleLogitsError, match="an optimizer stepped"):
        output.logits.softmax(-1)
    undone = weakref.ref(model)
    del model, report, output, optimizer
    gc.collect()
    assert undone() is None
    another = make()
    slothplug.patch(another)
    another(input_ids=IDS, labels=LABELS)
    assert step_counters() == [counter]
    assert {name: type(value) for name, value in vars(counter).items()} == {"steps": int, "_registered": bool}


def test_keep_logits_leaves_the_head_as_it_is() -> None:
    model = make()
    report = slothplug.patch(model, {"keep_logits": True, "strict": True})
    assert (head_of(report).status, head_of(report).reason) == ("left", "keep_logits is set")
    assert type(model(input_ids=IDS, labels=LABELS).logits) is torch.Tensor


def test_backward_hooks_on_the_head_fire() -> None:
    model = make()
    head, seen = patched(model), []
    model.lm_head.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output))
    step(model)
    assert len(seen) == 1
    assert head.calls.fallbacks["it has backward hooks"] == 1


def test_a_forward_hook_on_the_head_may_change_the_logits() -> None:
    model, stock = make(), make()
    head = patched(model)
    for each in (model, stock):
        each.lm_head.register_forward_hook(lambda module, inputs, output: output * 0.5)
    assert_same(step(model), step(stock))
    assert head.calls.served == 1


def test_an_exception_in_the_loss_is_the_callers() -> None:
    def fails(**_: Any) -> None:
        raise ValueError("mine")

    model = make()
    head = patched(model)
    model.loss_function = fails
    with pytest.raises(ValueError, match="mine"):
        model(input_ids=IDS, labels=LABELS)
    assert not head.calls.fallbacks
    model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
    assert step(model)[0].isfinite()
    assert head.calls.served == 1


# PEFT


def lora(model: nn.Module, seed: int = 1, **changes: Any) -> nn.Module:
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}],
    ids=["frozen head", "modules_to_save", "LoRA on the head"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_of_the_head_are_used_and_trained(when: str, changes: dict[str, Any], tied: bool) -> None:
    # https://github.com/huggingface/trl/issues/4612
    base, stock = make(tie_word_embeddings=tied), lora(make(tie_word_embeddings=tied), **changes)
    if when == "before":
        patched(base)
    model = lora(base, **changes)
    head = patched(model)
    assert_same(step(model), step(stock))
    assert (head.status, head.calls.served, dict(head.calls.fallbacks)) == ("fused", 1, {})
    with model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(model(input_ids=IDS, labels=LABELS).loss, stock(input_ids=IDS, labels=LABELS).loss)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trainable_tokens_of_a_tied_head_are_left() -> None:
    def build() -> nn.Module:
        return lora(make(tie_word_embeddings=True), trainable_token_indices={"embed_tokens": [5, 6]})

    model, stock = build(), build()
    head = patched(model)
    assert head.status == "left"
    assert "adapter is on the head" in head.reason
    assert_same(step(model), step(stock))


# The world around


def test_the_signature_that_the_trainer_reads_is_unchanged() -> None:
    # https://github.com/linkedin/Liger-Kernel/pull/339
    model = make()
    before = inspect.signature(model.forward), inspect.signature(type(model).forward)
    patched(model)
    assert (inspect.signature(model.forward), inspect.signature(type(model).forward)) == before


@pytest.mark.parametrize("wrapped", [False, True])
def test_trls_own_fused_head_is_left_alone(wrapped: bool) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    model = make()
    utils.add_fused_lm_head(model)
    head = head_of(slothplug.patch(lora(model) if wrapped else model))
    assert head.status == "left"
    assert head.excused
    assert "TRL" in head.reason


def test_trls_fused_head_put_on_later_computes_what_it_does_in_stock() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    model, stock = make(), make()
    patched(model)
    for each in (model, stock):
        utils.add_fused_lm_head(each)
    for extra in ({"fused_lm_head": True}, {}):
        assert_same(step(model, **extra), step(stock, **extra))


def test_another_head_than_a_linear_layer_is_left_with_the_reason() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model, stock = make(), make()
    for each in (model, stock):
        each.lm_head.__class__ = Scaled
    head = patched_or_left(model)
    assert head.status == "left"
    assert "not a plain linear layer" in head.reason
    assert_same(step(model), step(stock))
    with pytest.raises(NothingFusedError, match="not a plain linear layer"):
        slothplug.patch(model, {"ops": ["head"], "strict": True})


def patched_or_left(model: nn.Module) -> SiteReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", slothplug.NothingFusedWarning)
        return patched(model)


def test_a_kernel_that_computes_something_else_is_refused() -> None:
    from slothplug.patching.sites import Kernel

    class Plugin:
        @slothplug.hookimpl
        def slothplug_kernel(self, operation: str, device: Any, dtype: Any, settings: Any) -> Kernel | None:
            def wrong(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
                return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")  # no epilogue

            return Kernel("forgets the epilogue", "torch", wrong) if operation == "head" else None

    plugin = Plugin()
    slothplug.plugin_manager().register(plugin)
    try:
        head = patched_or_left(make())
    finally:
        slothplug.plugin_manager().unregister(plugin)
    assert head.status == "left"
    assert "mul" in head.reason


def test_copies_and_undo() -> None:
    model, stock = make(), make()
    report = slothplug.patch(model, {"ops": ["head"]})
    duplicate = copy.deepcopy(model)
    assert_same(step(duplicate), step(stock))
    report.undo()
    assert type(model(input_ids=IDS, labels=LABELS).logits) is torch.Tensor


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("loss", ["model's", "from outputs.logits", "both"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ddp(process_group: None, options: dict[str, bool], loss: str) -> None:
    def use(each: nn.Module) -> torch.Tensor:
        output = each(input_ids=IDS, labels=LABELS)
        own = F.cross_entropy(output.logits[:, :-1].reshape(-1, 128), LABELS[:, 1:].reshape(-1))
        return {"model's": output.loss, "from outputs.logits": own, "both": output.loss + own}[loss]

    model, stock = make(), make()
    head = patched(model)
    parallel = nn.parallel.DistributedDataParallel(model, **options)
    for _ in range(2):
        parallel.zero_grad()
        stock.zero_grad()
        use(parallel).backward()
        use(stock).backward()
        for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert head.calls.served == 2


@pytest.mark.parametrize(
    ("own_unit", "served"), [(None, 1), (False, 1), (True, 0)], ids=["root's", "kept whole", "freed after its call"]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fsdp2(process_group: None, own_unit: bool | None, served: int) -> None:
    """``own_unit`` is ``reshard_after_forward`` of the unit that the head is in; accelerate uses False."""
    from torch.distributed.fsdp import fully_shard

    model, stock = make(), make()
    head = patched(model)
    if own_unit is not None:
        fully_shard([model.model.norm, model.lm_head], reshard_after_forward=own_unit)
    fully_shard(model)
    loss, gradients = step(model)
    assert_same((loss, {name: gradient.full_tensor() for name, gradient in gradients.items()}), step(stock))
    assert head.calls.served == served
    assert dict(head.calls.fallbacks) == ({} if served else {"its weights are freed when its call ends": 1})


@cpu_only
@pytest.mark.filterwarnings("ignore")
def test_fsdp1(process_group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, stock = make(), make()
    head = patched(model)
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    loss = sharded(input_ids=IDS, labels=LABELS).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), step(stock)[0])
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.view_as(theirs), theirs.grad, rtol=1e-4, atol=1e-5)
    assert head.calls.served == 1
    assert not head.calls.fallbacks


def test_a_compiled_reader_of_the_logits() -> None:
    model, stock = make(num_hidden_layers=1), make(num_hidden_layers=1)
    patched(model)
    read = torch.compile(lambda logits: logits.log_softmax(-1).square().mean(), backend="eager")
    results = []
    for each in (model, stock):
        value = read(each(input_ids=IDS, labels=LABELS).logits)
        value.backward()
        results.append((value.detach(), {name: p.grad for name, p in each.named_parameters()}))
    assert_same(*results)


def test_torch_compile_of_the_model_gets_stock_logits() -> None:
    model, stock = make(num_hidden_layers=1), make(num_hidden_layers=1)
    head = patched(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=IDS, labels=LABELS).loss, stock(input_ids=IDS, labels=LABELS).loss)
    assert head.calls.served == 0


class TestTrainer:
    """Through the Hugging Face Trainer."""

    def run(self, directory: Path, model: nn.Module, trainer_options: dict[str, Any], **changes: Any) -> list[float]:
        rows = [
            {"input_ids": row, "labels": label}
            for row, label in zip(IDS.repeat(4, 1), LABELS.repeat(4, 1), strict=True)
        ]
        args = transformers.TrainingArguments(
            **{
                "output_dir": str(directory), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
                "max_steps": 2, "learning_rate": 1e-2, "report_to": [], "use_cpu": DEVICE == "cpu", "logging_steps": 1,
                "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, **changes,
            }
        )  # fmt: skip
        trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:3], **trainer_options)
        trainer.train()
        self.metrics = trainer.evaluate()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [*losses, *(value for key, value in self.metrics.items() if key in ("eval_loss", "eval_share"))]

    @staticmethod
    def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, 128), labels[:, 1:].reshape(-1))

    @staticmethod
    def share(prediction: Any) -> dict[str, float]:
        return {"share": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    @pytest.mark.parametrize(
        ("trainer_options", "changes", "served"),
        [
            ({}, {}, True),
            ({"compute_metrics": share}, {}, True),
            ({}, {"bf16": True}, True),
            ({}, {"optim": "adamw_torch_fused", "gradient_checkpointing": True}, True),
            ({}, {"label_smoothing_factor": 0.1}, False),
            ({"compute_loss_func": own_loss}, {}, False),
        ],
        ids=["plain", "compute_metrics", "bf16", "checkpointing", "label smoother", "compute_loss_func"],
    )
    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_runs_have_stock_losses(
        self, tmp_path: Path, trainer_options: dict[str, Any], changes: dict[str, Any], served: bool
    ) -> None:
        options = {key: getattr(value, "__func__", value) for key, value in trainer_options.items()}
        expected = self.run(tmp_path, make(), options, **changes)
        model = make()
        head = patched(model)
        got = self.run(tmp_path, model, options, **changes)
        assert got == pytest.approx(expected, rel=2e-3 if changes.get("bf16") else 1e-5)
        assert (head.calls.served > 0) == served
        reads = {reason for reason in head.calls.fallbacks if reason.startswith("logits were read")}
        assert bool(reads) == ("compute_metrics" in options), reads
