"""``TrainingArguments`` with the flag, for scripts that build their own."""

from __future__ import annotations

import copy
import copyreg
from dataclasses import dataclass, field
from typing import Any

import transformers

from slothplug.integrations.hf import frontdoor
from slothplug.integrations.hf.flag import METADATA, FlagArgument, flag_value


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with ``use_fast_kernels``.

    Works as the stock class does with ``HfArgumentParser`` (command line, YAML, JSON, dict). The flag is checked before
    anything else is. Where it is on, ``Trainer.__init__`` is wrapped (see ``slothplug.integrations.hf.frontdoor``), so
    that a trainer with these arguments gets a ``FastKernelsCallback``.

    Pickles, and so the ``training_args.bin`` of a checkpoint, hold the stock class with the flag as an attribute: they
    load where slothplug is absent.

    Raises:
        SettingsError: the flag or one of its settings is not valid.
    """

    use_fast_kernels: FlagArgument = field(default=False, metadata=METADATA)

    def __post_init__(self) -> None:
        self.use_fast_kernels = flag_value(self.use_fast_kernels)
        if self.use_fast_kernels:
            frontdoor.open_trainer(transformers.Trainer)
        super().__post_init__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not TrainingArguments:
            return super().__reduce_ex__(protocol)
        # Not copyreg.__newobj__: pickle insists there that the class is the object's own.
        return copyreg._reconstructor, (transformers.TrainingArguments, object, None), self.__dict__.copy()  # type: ignore[attr-defined]

    def __copy__(self) -> TrainingArguments:
        duplicate = object.__new__(type(self))
        duplicate.__dict__.update(self.__dict__)
        return duplicate

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingArguments:
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate
