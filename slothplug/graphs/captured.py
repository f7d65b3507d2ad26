"""One unit's forward and backward as recordings, and the autograd node that replays them."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from slothplug.graphs.call import Call
from slothplug.graphs.gradients import Gradients
from slothplug.graphs.isolation import aliased, no_autocast_cache, nothing_left_behind, uncounted
from slothplug.graphs.sessions import Session, Use
from slothplug.graphs.signature import (
    PLACEHOLDER,
    Layout,
    is_recordable,
    layout_of,
    mapped,
    put_together,
    shortened,
    skeleton,
)  # fmt: skip
from slothplug.graphs.state import GraphState
from slothplug.kernels.once_differentiable import once_differentiable
from slothplug.patching.forward_context import recorded_call
from slothplug.patching.served import STATE, Served

Value = TypeVar("Value")


class Purpose(enum.Enum):
    """What a unit's forward is recorded for.

    Attributes:
        CALL: its backward is replayed in the backward of the model.
        FIRST_PASS: under checkpointing, where nothing that it saves is kept.
        RECOMPUTE: its backward is replayed next; what it saves is alive at no other time.
    """

    CALL = enum.auto()
    FIRST_PASS = enum.auto()
    RECOMPUTE = enum.auto()


class Captured:
    """The recordings of one unit for one key.

    A recording does not refer to the unit, whose state refers to it.

    Attributes:
        unit: the unit's name.
        draws: whether the forward draws random numbers of the device.
    """

    def __init__(self, call: Call, layouts: Sequence[Layout], session: Session, purpose: Purpose) -> None:
        """Records the forward for calls like ``call``, whose tensors have these layouts or shorter sequences.

        Raises:
            Exception: what the unit's forward raises, or the device where the forward cannot be recorded.
        """
        state = call.served.shared
        self._owner = weakref.ref(state)
        self._session = weakref.ref(session)
        self._purpose = purpose
        self._grad = torch.is_grad_enabled()
        self.unit = call.served.name
        self._ignores_what_follows: bool | None = None
        self._place = len(session.captured)
        self._module = weakref.ref(call.module)
        self._args, self._kwargs = skeleton(call.args), {name: skeleton(value) for name, value in call.kwargs.items()}
        self._needs_grad = [self._grad and tensor.requires_grad for tensor in call.tensors]
        facts = session.facts_of(call.served)
        self._trained = facts.trained if self._grad else ()
        self._device = call.tensors[0].device
        self._mailbox, self._recorder = state.mailbox(self._device), state.recorder(self._device)
        self._boxes = [
            self._mailbox.box(("argument", i), layout, tensor)
            for i, (layout, tensor) in enumerate(zip(layouts, call.tensors, strict=True))
        ]
        self._use: weakref.ref[Use] | None = None
        self._outputs: list[torch.Tensor] = []
        self._differentiable: list[bool] = []
        self._leaves: list[torch.Tensor] = []
        self._delivered: list[torch.Tensor] = []
        self._structure: Any = None
        self._counted: list[tuple[Any, int, int]] = []
        self._mailbox.load(self._boxes, call.tensors)
        with nothing_left_behind(call.module, self._device):
            if self._grad not in facts.draws:
                facts.draws[self._grad] = self._recorder.rehearse(self._rehearse)
            self._replay = self._recorder.record(self._run_forward)
        self.draws = facts.draws[self._grad]
        self._replay_backward: Any = None
        self._grad_boxes = [
            self._mailbox.box(("grad_output", i), layout_of(y), y) for i, y in enumerate(self._delivered)
        ]
        self._grads: Gradients | None = None
        if purpose is Purpose.FIRST_PASS:
            self._drop_saved()

    def _state(self) -> GraphState:
        state = self._owner()
        assert state is not None  # it holds this
        return state

    def is_free(self) -> bool:
        """Whether no backward of an earlier replay may still come, and no later unit was replayed in this call."""
        session, use = self._session(), None if self._use is None else self._use()
        in_order = self._purpose is Purpose.RECOMPUTE or (session is not None and session.last < self._place)
        return in_order and (use is None or not use.is_open())

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the unit's forward returns for arguments with these tensors."""
        if self._grad:
            outputs = _Replayed.apply(self, tensors, *self.inputs(tensors), *(each.now() for each in self._trained))
        else:
            outputs = self.replay(tensors)
        return self.returned(outputs)

    def returned(self, outputs: Iterable[torch.Tensor]) -> Any:
        """What the unit's forward returns if these are the tensors in it."""
        remaining = iter(outputs)
        return mapped(self._structure, lambda _: next(remaining))

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the arguments' tensors that need a gradient."""
        return [tensor for tensor, needed in zip(tensors, self._needs_grad, strict=True) if needed]

    def differentiable(self, values: Sequence[Value]) -> list[Value]:
        """Those of ``values``, one for each output, whose outputs have a gradient."""
        return [value for value, needed in zip(values, self._differentiable, strict=True) if needed]

    def replay(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, in memory of their own, for arguments with these tensors."""
        self.replay_for_backward(tensors)
        return self._outputs_for(tensors)

    def _outputs_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is in the boxes of the outputs, as far as these tensors' sequences go."""
        x = tensors[0]
        if x.shape == self._boxes[0].shape:
            return [box.clone() for box in self._delivered]
        return [shortened(box, x.shape).clone() for box in self._delivered]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a replay answers for arguments with these tensors: of the recorded shapes, or shorter sequences whose
        answer does not depend on what follows them."""
        if tensors[0].shape == self._boxes[0].shape:
            return True
        if self._ignores_what_follows is None:
            self._ignores_what_follows = self._tries_what_follows(tensors)
        return self._ignores_what_follows

    def _tries_what_follows(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Replays the forward with zeros after the end, and with ones: no output may differ, in any bit.

        A longer sequence draws other random numbers.
        """
        if self.draws or any(box.shape != self._boxes[0].shape for box in self._delivered):
            return False
        outputs = []
        for value in (0, 1):
            self._mailbox.forget()
            self._mailbox.load(self._boxes, tensors, value)
            self._replay()
            outputs.append(self._outputs_for(tensors))
        self._mailbox.forget()
        return all(map(torch.equal, *outputs))

    def replay_for_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Computes what ``backward`` reads."""
        self._mailbox.load(self._boxes, tensors)
        session, state = self._session(), self._state()
        if session is not None and self._purpose is not Purpose.RECOMPUTE:
            session.last = self._place
        state.replays += 1
        self._replay()
        for calls, served, collected in self._counted:
            calls.served += served
            calls.collected += collected

    def open_use(self) -> Use:
        use = Use(self._state())
        self._use = weakref.ref(use)
        return use

    def backward(
        self, grad_outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Size]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs that need one and of the trained parameters.

        Args:
            tensors: shapes of the inputs that need a gradient.
        """
        self._mailbox.load(self._grad_boxes, grad_outputs)
        if self._replay_backward is None:
            self._record_backward()
        if self._replay_backward is None:
            self._run_backward()
        else:
            self._replay_backward()
        assert self._grads is not None
        if self._purpose is Purpose.RECOMPUTE:
            self._drop_saved()
        grads = self._grads.delivered()
        for i, shape in enumerate(tensors):
            grad = grads[i]
            grads[i] = None if grad is None else shortened(grad, shape)
        return grads

    def _record_backward(self) -> None:
        try:
            self._replay_backward = self._recorder.record(self._run_backward)
        except Exception as error:
            if self.draws:
                # Attention that is recorded saves its random numbers where only a recording can read them.
                raise RuntimeError(
                    f"the backward of {self.unit}, which draws random numbers, cannot be recorded ({error}), and its "
                    "recorded forward allows no other: set graphs: off"
                ) from error
            if session := self._session():
                session.captured = {key: one for key, one in session.captured.items() if one is not self}
            self._state().reasons[f"its backward cannot be recorded: {error}"] += 1

    def release(self) -> None:
        """Drops what autograd saved in the recording, and the recording if it has no backward."""
        self._drop_saved()
        session = self._session()
        needs_backward = self._grad and self._purpose is not Purpose.FIRST_PASS
        if needs_backward and self._replay_backward is None and session is not None:
            session.captured = {key: one for key, one in session.captured.items() if one is not self}

    def _drop_saved(self) -> None:
        """Gives the memory of what autograd saved back to the pool, for other recordings."""
        self._outputs, self._leaves = [], []

    def _run_forward(self) -> None:
        self._drop_saved()  # of an earlier run
        module = self._module()
        assert module is not None
        served: Served[Any, GraphState] = module.__dict__[STATE]
        # What the backward reads must outlive the box, which holds the next unit's argument by then.
        inputs = [box.clone().requires_grad_(needed) for box, needed in zip(self._boxes, self._needs_grad, strict=True)]
        args, kwargs = put_together(self._args, self._kwargs, inputs)
        with (
            aliased(self._trained) as aliases,
            recorded_call(served.context),
            uncounted(module) as counted,
            torch.set_grad_enabled(self._grad),
            no_autocast_cache(),
        ):
            output = served.original(module, *args, **kwargs)
        if not is_recordable(output):
            raise TypeError(f"its forward returns a {type(output).__name__}")
        self._counted = counted
        outputs: list[torch.Tensor] = []
        mapped(output, outputs.append)
        self._structure = skeleton(output)
        self._leaves = [*(t for t, needed in zip(inputs, self._needs_grad, strict=True) if needed), *aliases]
        self._differentiable = [y.requires_grad for y in outputs]
        self._delivered = [self._mailbox.box(("output", i), layout_of(y), y) for i, y in enumerate(outputs)]
        with torch.no_grad():
            for box, y in zip(self._delivered, outputs, strict=True):
                box.copy_(y)
        with torch.set_grad_enabled(self._grad):
            self._outputs = [_WithoutMemory.apply(y) for y in outputs]

    def _rehearse(self) -> None:
        """Forward and backward outside of a recording: what one of them saves must not be read in the other."""
        self._run_forward()
        if any(self._differentiable):
            self._gradients([torch.zeros_like(box) for box in self._delivered])
        self._drop_saved()

    def _gradients(self, grad_outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(
            self.differentiable(self._outputs),
            self._leaves,
            self.differentiable(grad_outputs),
            retain_graph=True,
            allow_unused=True,
        )

    def _run_backward(self) -> None:
        grads = self._gradients(self._grad_boxes)
        if self._grads is None:
            self._grads = Gradients(grads, self._mailbox)
        self._grads.put(grads)


class _WithoutMemory(torch.autograd.Function):
    """A tensor that has the gradient of another one and none of its memory: a recording keeps it for its backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.new_empty(()).expand(y.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        return grad_output


class _Replayed(torch.autograd.Function):
    """Inputs: the recording, the arguments' tensors, those of them that need gradients, the trained parameters."""

    @staticmethod
    def forward(
        ctx: Any, captured: Captured, tensors: Sequence[torch.Tensor], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.captured, ctx.use = captured, captured.open_use()
        ctx.save_for_backward(PLACEHOLDER)  # a second backward without retain_graph raises what it raises anywhere
        ctx.shapes = [tensor.shape for tensor in captured.inputs(tensors)]
        outputs = captured.replay(tensors)
        kept = captured.differentiable(outputs)
        ctx.mark_non_differentiable(*(y for y in outputs if all(y is not one for one in kept)))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018
        grads = ctx.captured.backward(grad_outputs, ctx.shapes)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.use.end()
        return (None, None, *grads)
