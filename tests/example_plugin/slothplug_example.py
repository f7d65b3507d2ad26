"""A kernel for the operation rms_norm, and a site for a norm that stores the logarithm of its weight."""

from functools import partial

import torch

from slothplug.plugin import (
    OTHER_ARGUMENTS,
    Kernel,
    Site,
    device_of,
    difference,
    dtype_of,
    hookimpl,
    kernel_for,
    probe_rows,
    twin,
    why_not_input,
    why_not_now,
)


def example_rms_norm(x, weight, eps, *, offset=0.0, casting="before_weight"):
    x32 = x.float()
    n = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return n.to(x.dtype)
    if casting == "after_weight":
        return (n * (weight.float() + offset)).to(x.dtype)
    return n.to(x.dtype) * (weight + offset if offset else weight)


@hookimpl
def slothplug_kernel(operation, device, dtype, settings):
    return Kernel("example", "torch", example_rms_norm) if operation == "rms_norm" else None


@hookimpl
def slothplug_find_sites(model, settings):
    for name, module in model.named_modules():
        if list(module._parameters) == ["log_weight"] and isinstance(getattr(module, "eps", None), float):
            kernel = kernel_for("rms_norm", device_of(module), dtype_of(module), settings)
            key = (type(module), module.eps, dtype_of(module))
            yield Site("rms_norm", name, module, fast, module.eps, kernel, partial(prove, module, kernel), key)


def fast(module, served, /, *args, **kwargs):
    if len(args) != 1 or kwargs:
        return served.fall_back(module, OTHER_ARGUMENTS, *args, **kwargs)
    if refusal := why_not_now() or why_not_input(args[0], served.device_type):
        return served.fall_back(module, refusal, *args)
    return served.calls.serve(served.kernel(args[0], module.log_weight.exp(), served.spec))


def prove(module, kernel):
    double = twin(module, torch.float32)
    x = probe_rows(double.log_weight.numel(), torch.float32, device_of(module))

    def candidate(x):
        return kernel.function(x, double.log_weight.exp(), module.eps)

    return difference(candidate, double, [x], [double.log_weight])
