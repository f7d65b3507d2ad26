"""The fused loss of whole models: every architecture, way of counting, label and dtype gets stock's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.patching.device import DEVICE, cpu_only
from tests.patching.heads import IDS, LABELS, assert_same, make, patched, step

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
