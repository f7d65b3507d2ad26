"""``torch.compile`` beside a patch: a compiler is given the stock forward, and the report says where.

Serving compiled modules would need a graph break at each of them, and a graph for each piece in between: on a CPU a
step so served is slower than the compiled and the uncompiled stock model.
"""

from __future__ import annotations

import warnings

from torch import nn

from slothplug.errors import NothingFusedWarning
from slothplug.patching.sites import Refusal


def is_compiled(module: nn.Module) -> bool:
    """True for what ``torch.compile(module)`` returns, and after ``module.compile()`` and the like of ``forward``."""
    own = module.__dict__
    return (
        any(base.__name__ == "OptimizedModule" for base in type(module).__mro__)
        or own.get("_compiled_call_impl") is not None
        or hasattr(own.get("forward"), "_torchdynamo_orig_callable")
    )


def why_not_compiled(model: nn.Module) -> dict[nn.Module, Refusal]:
    """The modules that run inside a compiled call, and why each is not served.

    Args:
        model: what the user calls, wrappers included.
    """
    found: dict[nn.Module, Refusal] = {}
    for name, module in model.named_modules():
        if is_compiled(module):
            where = f"'{name}'" if name else "the whole model"
            refusal = Refusal(
                f"torch.compile compiles {where}, and a compiler is given the stock forward; leave it "
                f"uncompiled to have it fused"
            )
            for inner in module.modules():
                found.setdefault(inner, refusal)
    return found


def warn_of_compilation(base: type[nn.Module]) -> None:
    """Warns that a compiler is given the stock forward of a served module; ``base`` is the module's stock class.

    Called while a compiler traces. Compiled code counts no calls: it would have to be compiled again for each number.
    """
    warnings.warn(
        f"use_fast_kernels is on, but torch.compile compiles {base.__name__}, which slothplug serves. A compiler is "
        f"given the stock forward, so compiled modules do not run on fused kernels: leave out torch.compile, or "
        f"use_fast_kernels.",
        NothingFusedWarning,
        stacklevel=2,
    )
