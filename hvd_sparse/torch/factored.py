"""Averages of which some travel as factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_sparse.collectives.factors import Product, gather_rows, is_smaller, sum_products
from hvd_sparse.config import Config
from hvd_sparse.drivers.horovod_torch import HorovodTorch
from hvd_sparse.ops.torch import TorchOps
from hvd_sparse.torch.averager import Averager
from hvd_sparse.torch.linears import Linears


class FactoredAverager(Averager):
    """Weights of linear layers are in no bucket if their factors were fewer words in the first exchange.

    Their exchange starts at the end of the backward pass, when it is known what else has become of their gradients, and
    is one for all layers. Whether factors are fewer words this time is decided again, by all ranks alike.

    Args:
        model: whose linear layers to look at.
        arguments: those of `Averager`.
    """

    def __init__(
        self, names: dict[Any, str], config: Config, driver: HorovodTorch, *, model: torch.nn.Module, **arguments: Any
    ) -> None:
        self._linears = Linears(model, names)
        self._factored: list[Any] | None = None  # the weights; None: nobody has looked yet
        super().__init__(names, config, driver, **arguments)

    def _forget_gradients(self) -> None:
        super()._forget_gradients()
        self._linears.forget()

    def _plan_buckets(self, parameters: Sequence[Any]) -> None:
        if self._factored is None:
            self._factored = self._choose(list(self._linears.weights))
        factored = set(self._factored)
        super()._plan_buckets([p for p in parameters if p not in factored])

    def _choose(self, weights: list[Any]) -> list[Any]:
        world, layers = self.driver.world(0), [self._product(weight) for weight in weights]
        counts = self.driver.run("factors", gather_rows(TorchOps(), world, layers))
        return [
            weight for weight, layer, rows in zip(weights, layers, counts)
            if max(rows) > 0 and is_smaller(world.size, rows, layer.shape)
        ]  # fmt: skip

    def _product(self, weight: Any) -> Product:
        has_gradient = weight in self._touched and weight.grad is not None
        return self._linears.product(weight, self._local_grad(weight) if has_gradient else None)

    def _start_outside_buckets(self) -> None:
        super()._start_outside_buckets()
        if self._factored:
            layers = [self._product(weight) for weight in self._factored]
            self.driver.start("factors", sum_products(TorchOps(), self.driver.world(self.num_exchanges), layers))

    def _averages_outside_buckets(self, results: dict[str, Any]) -> dict[Any, torch.Tensor]:
        grads, size = super()._averages_outside_buckets(results), self.driver.world(0).size
        for weight, (total, as_factors) in zip(self._factored or (), results.get("factors", ())):
            self._finite.append(TorchOps().all_finite(total))
            grads[weight] = (total / size if self.average else total).to(weight.dtype)
            self.counters.factors[self.names[weight]] = "factors" if as_factors else "whole"
            self.counters.bytes_dense += 8 * weight.numel() * (size - 1) / size
        return grads

    def close(self) -> None:
        super().close()
        self._linears.close()
