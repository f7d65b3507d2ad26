"""The head inside what trains a model: DDP, FSDP, torch.compile and the Hugging Face Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from tests.patching.device import DEVICE, cpu_only
from tests.patching.heads import IDS, LABELS, assert_same, make, patched, step


def test_the_signature_that_the_trainer_reads_is_unchanged() -> None:
    # https://github.com/linkedin/Liger-Kernel/pull/339
    model = make()
    before = inspect.signature(model.forward), inspect.signature(type(model).forward)
    patched(model)
    assert (inspect.signature(model.forward), inspect.signature(type(model).forward)) == before


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
