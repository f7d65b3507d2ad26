"""LLaMA-Factory's arguments as it takes them, a mapping or the words of a command line: read, changed, taken out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from slothplug.integrations.hf.flag import FALSE

Arguments = dict[str, Any] | list[str]


def read(args: Arguments, keys: Iterable[str]) -> dict[str, Any]:
    """The values of those of ``keys`` that are given."""
    if isinstance(args, dict):
        return {key: args[key] for key in keys if key in args}
    return vars(_parser(keys).parse_known_args(args)[0])


def is_on(value: object) -> bool:
    """Whether the value of a switch stands for true."""
    return value.lower() not in FALSE if isinstance(value, str) else bool(value)


def change(args: Arguments, **values: Any) -> Arguments:
    """The arguments with these values: bools, or mappings as JSON can hold them."""
    if isinstance(args, dict):
        return args | values
    words = [word for key, value in values.items() for word in (f"--{key}", json.dumps(value))]
    return [*args, *words]  # the last one counts


def without(args: Arguments, key: str) -> Arguments:
    """The arguments with ``key`` left out."""
    if isinstance(args, dict):
        return {name: value for name, value in args.items() if name != key}
    return _parser([key]).parse_known_args(args)[1]


def _parser(keys: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for key in keys:
        # HfArgumentParser takes both spellings, and a switch without a value as true.
        parser.add_argument(f"--{key}", f"--{key.replace('_', '-')}", dest=key, nargs="?", const=True)
    return parser
