"""Linear layers whose weights' gradients travel as factors: what they are, and how their factors are found."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hvd_sparse.collectives.factors import Product

_Weight = Any  # torch.nn.Parameter
# From the output of torch.nn.Linear back to its weight. Other ways are not followed: such a layer travels whole.
_STEPS = (("ViewBackward0", "UnsafeViewBackward0"), ("AddmmBackward0", "MmBackward0"), ("TBackward0",),
          ("ToCopyBackward0",))  # fmt: skip


@dataclass(frozen=True)
class _Use:
    """What backward made of one call of a layer."""

    inputs: torch.Tensor
    version: int
    outputs: torch.Tensor  # (R, d_out) their gradients
    gradient: torch.Tensor  # (d_in, d_out) its part in the gradient of the weight


class Linears:
    """Remembers of each layer the last call that backward went through.

    That call's factors are the layer's gradient if, and only if, its part in the gradient is all of it. This is
    compared bit by bit, so that whatever else a weight may be used for (another call, a penalty, another layer), and
    whatever may be done to its gradient, is noticed. Then the layer's factors are not known, and it travels whole.

    Args:
        model: whose `torch.nn.Linear` modules are watched; subclasses may compute something else.
        weights: those that may be of interest.
    """

    def __init__(self, model: torch.nn.Module, weights: Iterable[_Weight]) -> None:
        self.weights = linear_weights(model, weights)
        self._last: dict[_Weight, _Use] = {}
        modules = [module for module in model.modules() if is_linear(module) and module.weight in self.weights]
        self._handles = [module.register_forward_hook(_Watch(self._called)) for module in modules]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    def forget(self) -> None:
        """The last calls are of no interest any more."""
        self._last.clear()

    def product(self, weight: _Weight, grad: torch.Tensor | None) -> Product:
        """This rank's part in the exchange of a weight.

        Args:
            grad: the gradient since the last exchange; None: there is none.
        """
        (height, width), use = weight.shape, self._last.get(weight)
        if grad is None:
            nothing = torch.zeros((), device=weight.device)
            factors = nothing.expand(0, width), nothing.expand(0, height)
            return Product((height, width), nothing.expand(height * width), factors)
        known = use is not None and use.inputs._version == use.version
        if use is None or not known or not torch.equal(grad, use.gradient.t().to(grad.dtype)):
            return Product((height, width), grad.detach().float().reshape(-1), None)
        inputs = use.inputs.detach().to(use.outputs.dtype).reshape(-1, width)  # autocast rounds them so
        return Product((height, width), grad.detach().float().reshape(-1), (inputs.float(), use.outputs.float()))

    def _called(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not is_linear(module) or module.weight not in self.weights:
            return
        weight, inputs = module.weight, args[0] if args else None
        node = _product_node(getattr(output, "grad_fn", None), weight)
        if node is None or type(inputs) is not torch.Tensor or inputs.layout != torch.strided:
            return
        inputs, version = inputs.detach(), inputs._version  # the one that both count

        def went_through(grad_inputs: Any, grad_outputs: Any) -> None:
            if grad_inputs[-1] is not None:
                self._last[weight] = _Use(inputs, version, grad_outputs[0].detach(), grad_inputs[-1].detach())

        node.register_hook(went_through)


def linear_weights(model: torch.nn.Module, parameters: Iterable[_Weight]) -> dict[_Weight, None]:
    """Those of the parameters that are weights of linear layers, in their order."""
    known = {module.weight for module in model.modules() if is_linear(module)}
    return dict.fromkeys(parameter for parameter in parameters if parameter in known)


def is_linear(module: Any) -> bool:
    """Whether it computes what `torch.nn.Linear` computes, from a weight that is a parameter."""
    return type(module) is torch.nn.Linear and "forward" not in vars(module) and "weight" in module._parameters


class _Watch:
    """A forward hook. Copies of the model, and its pickles, have one that does nothing."""

    def __init__(self, called: Any) -> None:
        self._called = called

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self._called(module, args, output)

    def __reduce__(self) -> Any:
        return functools.partial, (_ignore,)


def _ignore(module: Any, args: Any, output: Any) -> None:
    """Instead of `_Watch`."""


def _product_node(node: Any, weight: _Weight) -> Any:
    """The matrix product that ended in `node`, of something with the weight; None if that is not how it came about."""
    product = None
    for names in _STEPS:
        if node is not None and node.name() in names:
            product = node if "MmBackward0" in names else product
            node = node.next_functions[-1][0]
    return product if getattr(node, "variable", None) is weight else None
