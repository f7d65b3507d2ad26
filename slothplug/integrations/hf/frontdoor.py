"""The front door: what is wrapped in transformers so that ``use_fast_kernels`` is an argument like any other.

Nothing here runs on ``import slothplug`` or in ``slothplug.patch``. It is reached by ``slothplug run`` and
``slothplug autoload``, by ``install()``, and, for the trainer's half, by constructing
``slothplug.integrations.hf.TrainingArguments`` with the flag on. It changes

- ``transformers.TrainingArguments`` and every dataclass derived from it (``SFTConfig``, ``DPOConfig``, ...): a field
  ``use_fast_kernels`` that ``HfArgumentParser``, ``to_dict`` and ``dataclasses.replace`` know, ``__init__`` and
  ``__post_init__``. Dataclasses that are derived later inherit the field by themselves;
- ``transformers.Trainer.__init__``: adds a ``FastKernelsCallback`` where its arguments carry the flag.

Each is done once, and ``uninstall()`` puts back what was there. It never changes a model: the callback does.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from slothplug.errors import UndoError
from slothplug.integrations.hf.flag import METADATA, FlagArgument, flag_value
from slothplug.settings import FLAG

_MISSING = object()
_changes: list[tuple[type, str, Any, Any]] = []
"""Class, attribute, what its ``__dict__`` held before (``_MISSING``: nothing), and what we set; oldest first."""

_fields: list[type] = []
"""Classes whose table of dataclass fields got ours."""


def install() -> None:
    """Opens both halves of the door now. Does nothing where they are open."""
    import transformers

    open_arguments(transformers.TrainingArguments)
    open_trainer(transformers.Trainer)


def uninstall() -> None:
    """Puts back everything that ``install`` and the constructors changed. Does nothing where nothing was.

    A dataclass that was derived while the door was open keeps the field: it is its own.

    Raises:
        UndoError: something else was wrapped above ours since; nothing was changed.
    """
    for owner, name, _, ours in _changes:
        if owner.__dict__.get(name) is not ours:
            raise UndoError(
                f"{owner.__qualname__}.{name} was replaced by somebody else after slothplug wrapped it. Undo that "
                f"first."
            )
    for owner, name, before, _ in reversed(_changes):
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    for owner in _fields:
        del owner.__dataclass_fields__[FLAG]  # type: ignore[attr-defined]
        owner.__annotations__.pop(FLAG, None)
    _changes.clear()
    _fields.clear()


def open_arguments(base: type) -> None:
    """Adds the field to ``base`` (``transformers.TrainingArguments``) and to the dataclasses derived from it so far."""
    if FLAG in base.__dict__:
        return
    _set(base, FLAG, False)
    _set(base, "__post_init__", _checking(base.__post_init__))  # type: ignore[attr-defined]
    base.__annotations__[FLAG] = FlagArgument  # where HfArgumentParser, by typing.get_type_hints, finds the type
    for cls in _with_derived(base):
        fields = cls.__dict__.get("__dataclass_fields__")
        if fields is not None and FLAG not in fields:
            fields[FLAG] = _field()
            _fields.append(cls)
            _set(cls, "__init__", _accepting(cls.__init__))  # type: ignore[misc]


def open_trainer(trainer: type) -> None:
    """Wraps the ``__init__`` of ``trainer`` (``transformers.Trainer``) to add the callback where the flag is on."""
    if not any(owner is trainer for owner, *_ in _changes):
        _set(trainer, "__init__", _adding_callback(trainer.__init__))  # type: ignore[misc]


def _set(owner: type, name: str, value: Any) -> None:
    _changes.append((owner, name, owner.__dict__.get(name, _MISSING), value))
    setattr(owner, name, value)


def _with_derived(cls: type) -> Iterator[type]:
    yield cls
    derived: type
    for derived in cls.__subclasses__():
        yield from _with_derived(derived)


def _field() -> dataclasses.Field[Any]:
    """A field as ``dataclasses.dataclass`` would have entered it; made by that function, whose marks are private."""

    @dataclasses.dataclass
    class Holder:
        use_fast_kernels: FlagArgument = dataclasses.field(default=False, metadata=METADATA)

    return Holder.__dataclass_fields__[FLAG]


def _accepting(original: Callable[..., None]) -> Callable[..., None]:
    """A generated ``__init__`` that also takes the flag, before ``__post_init__`` checks it."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if FLAG in kwargs:
            setattr(self, FLAG, kwargs.pop(FLAG))
        original(self, *args, **kwargs)

    return __init__


def _checking(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, FLAG, flag_value(getattr(self, FLAG)))
        original(self, *args, **kwargs)

    return __post_init__


def _adding_callback(original: Callable[..., None]) -> Callable[..., None]:
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        flag = getattr(given.get("args"), FLAG, False)
        if flag:
            # Not above: the callback's module imports transformers.trainer, which imports what opens this door.
            from slothplug.integrations.hf.callback import FastKernelsCallback

            callbacks = list(given.get("callbacks") or ())
            classes = [callback if isinstance(callback, type) else type(callback) for callback in callbacks]
            if not any(issubclass(cls, FastKernelsCallback) for cls in classes):
                given["callbacks"] = [*callbacks, FastKernelsCallback(flag)]
            return original(self, **given)
        return original(self, *args, **kwargs)

    return __init__
