"""A new operation: Dynamic Tanh, weight * tanh(alpha * x) + bias (arXiv 2503.10622), scale and shift in one pass."""

from functools import partial

import torch

from slothplug import plugin

NAME = "dynamic_tanh"


def dynamic_tanh(x, alpha, weight, bias):
    return torch.addcmul(bias, torch.tanh(alpha * x), weight)


@plugin.hookimpl
def slothplug_operations():
    return [plugin.Operation(NAME, "Dynamic Tanh with scale and shift in one pass")]


@plugin.hookimpl
def slothplug_kernel(operation, dtype):
    return plugin.Kernel(NAME, "torch", dynamic_tanh) if operation == NAME and dtype == torch.float32 else None


@plugin.hookimpl
def slothplug_find_sites(model, settings):
    for name, module in model.named_modules():
        if module._parameters.keys() == {"alpha", "weight", "bias"}:
            device, dtype = plugin.device_of(module), plugin.dtype_of(module)
            if kernel := plugin.kernel_for(NAME, device, dtype, settings):
                proof = partial(prove, module, kernel)
                yield plugin.Site(NAME, name, module, fast, None, kernel, proof, verdict_key=type(module))
            else:
                yield plugin.Left(NAME, name, module, plugin.Refusal(f"no kernel for {dtype}"))


def fast(module, served, /, *args, **kwargs):
    if len(args) != 1 or kwargs:
        return served.fall_back(module, plugin.OTHER_ARGUMENTS, *args, **kwargs)
    if refusal := plugin.why_not_now() or plugin.why_not_input(args[0], served.device_type):
        return served.fall_back(module, refusal, *args)
    if args[0].dtype != torch.float32 or module.weight.dtype != torch.float32:
        return served.fall_back(module, plugin.Refusal("proved in float32 only"), *args)
    return served.calls.serve(served.kernel(args[0], module.alpha, module.weight, module.bias))


def prove(module, kernel):
    double = plugin.twin(module, torch.float32)
    weights = [double.alpha, double.weight, double.bias]
    x = plugin.probe_rows(double.weight.numel(), torch.float32, plugin.device_of(module))
    return plugin.difference(lambda x: kernel.function(x, *weights), double, [x], weights)
