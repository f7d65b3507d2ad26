"""The flag's schema, the same in every framework: ``use_fast_kernels: true | false | {setting: value, ...}``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from slothplug.errors import SettingsError

FLAG = "use_fast_kernels"

flags_read = 0
"""How many flags that are not ``False`` were read in this process; ``integrations/bootstrap`` warns where none was."""


# YAML 1.1, which frameworks read, takes a bare ``off`` for false.
AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(lambda value: "off" if value is False else value)]


class Settings(BaseModel):
    """Everything a user can say about a patch. Immutable; unknown names are refused with the nearest known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    ops: tuple[str, ...] | None = Field(
        default=None,
        strict=False,  # files hold lists
        description="Operations to fuse; by default every registered one (rms_norm, rotary, glu, lora, head, "
        "plugins').",
    )
    skip_ops: tuple[str, ...] = Field(default=(), strict=False, description="Operations to leave as they are.")
    backend: Literal["auto", "triton", "torch"] = Field(
        default="auto",
        description="Kernel backend: 'auto' takes Triton on a GPU that it supports and PyTorch elsewhere.",
    )
    strict: bool = Field(
        default=False,
        description="Raise where a site had to be left as it was, instead of reporting it. Not where that is excused: "
        "kinds that no version serves yet (DoRA, say), and what the objective needs, such as logits.",
    )
    verify: bool = Field(
        default=True,
        description="Compare fast and original forward and backward on a small probe before a site is fused. Without "
        "it, sites are fused by their types and attributes alone, and the report says so.",
    )
    lora_precision: Literal["peft", "compute"] = Field(
        default="peft",
        description="'peft' keeps PEFT's dtypes: float32 adapters outside autocast multiply in float32. 'compute' "
        "casts adapters to the dtype of the input: faster without autocast, and not PEFT's numbers.",
    )
    keep_logits: bool = Field(
        default=False,
        description="Always compute real logits in the output head, as stock does, even where only the loss is used.",
    )
    loss_chunk_mib: int = Field(
        default=512, ge=1, description="Budget in MiB for the logits of one chunk in the fused head."
    )

    checkpointing: AutoOrOff = Field(
        default="auto",
        description="'auto' runs torch's reentrant gradient checkpointing as its other kind, whose recompute in the "
        "backward ends where nothing more is read; 'off' leaves it.",
    )
    graphs: AutoOrOff = Field(
        default="auto",
        description="'auto' records the repeated layers as CUDA graphs where their shapes recur, and replays them: "
        "short steps become several times faster.",
    )
    graph_shapes: int = Field(default=16, ge=1, description="The most shapes for which graphs are kept.")
    graph_after: int = Field(default=2, ge=1, description="How often a shape is met before it is recorded.")
    graph_padding: bool = Field(
        default=True,
        description="Where lengths vary, replay layers in which no position reads a later one for sequences up to a "
        "multiple of 64: the same sums in another order, so not the same bits.",
    )

    @classmethod
    def from_flag(cls, flag: bool | Mapping[str, Any] | Settings) -> Settings | None:
        """The settings that a flag's value stands for; None where it is ``False``.

        Raises:
            SettingsError: the flag is of another type, or a key or value is not valid.
        """
        global flags_read
        flags_read += flag is not False
        if isinstance(flag, Settings):
            return flag
        if isinstance(flag, bool):
            return cls() if flag else None
        if not isinstance(flag, Mapping):
            raise SettingsError(
                f"{FLAG} is {flag!r} ({type(flag).__name__}). Use true, false, or a mapping of settings such as "
                f"{{strict: true, skip_ops: [rotary]}}."
            )
        try:
            return cls(**flag)
        except ValidationError as error:
            raise SettingsError(_explain(error)) from None
        except TypeError:
            raise SettingsError(f"{FLAG}: the names of settings are words, found {list(flag)!r}.") from None

    def wants(self, op: str) -> bool:
        """Whether operation ``op`` is to be fused."""
        return op not in self.skip_ops and (self.ops is None or op in self.ops)

    def check_ops(self, registered: list[str]) -> None:
        """Refuses names of operations that no plugin registered."""
        for setting, names in (("ops", self.ops or ()), ("skip_ops", self.skip_ops)):
            for name in names:
                if name not in registered:
                    raise SettingsError(
                        f"{FLAG}.{setting} names '{name}', which is no operation here.{_nearest(name, registered)} "
                        f"Known operations: {', '.join(sorted(registered))}."
                    )


def _nearest(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f" Did you mean '{match[0]}'?" if match else ""


def _explain(error: ValidationError) -> str:
    known = list(Settings.model_fields)
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{FLAG}.{path} is not a setting.{_nearest(path, known)} Settings: {', '.join(known)}.")
        else:
            message = item["msg"].replace("valid tuple", "list of names")
            lines.append(f"{FLAG}.{path} is {item['input']!r}: {message[0].lower()}{message[1:]}.")
    return "\n".join(lines)
