"""However a patched model is called, its numbers are stock's: in threads, with hooks, on odd inputs, in generation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slothplug
from tests.patching.full_and_lora import IDS, Outcome, assert_same, core, full, gradients, pair, reasons, step

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
