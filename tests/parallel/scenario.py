"""The model, data and reference of the scenarios: see "Harness" in scenarios.md.

Operations have names: Horovod names others after a number, which differs where only some ranks use a process set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import horovod.torch as horovod
import torch

torch.set_num_threads(1)

Model = torch.nn.Module
Batch = tuple[torch.Tensor, torch.Tensor]


def make_model(seed: int = 0) -> Model:
    """M: equal on all ranks."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


def batches(count: int, seed: int | None = None) -> Iterator[Batch]:
    """This rank's data."""
    generator = torch.Generator().manual_seed(100 + horovod.rank() if seed is None else seed)
    for _ in range(count):
        yield torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def loss_of(model: Model, batch: Batch) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(model: Model, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def train(model: Model, optimizer: torch.optim.Optimizer, data: Iterator[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def train_reference(
    model: Model,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Batch],
    before_step: Callable[[], None] = lambda: None,
) -> None:
    """REF: explicit dense averaging by Horovod, plain optimizer."""
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        for name, parameter in model.named_parameters():
            parameter.grad = horovod.allreduce(parameter.grad, op=horovod.Average, name=f"reference.{name}")
        before_step()
        optimizer.step()


def flat(model: Model) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def flat_grad(model: Model) -> torch.Tensor:
    return torch.cat([p.grad.detach().float().reshape(-1) for p in model.parameters()])


def assert_same_on_ranks(tensor: torch.Tensor) -> None:
    """Equal bit for bit on every rank."""
    gathered = horovod.allgather(tensor.detach().reshape(1, -1).contiguous(), name="same on ranks")
    for rank in range(1, len(gathered)):
        difference = float((gathered[0] - gathered[rank]).abs().max())
        assert torch.equal(gathered[0], gathered[rank]), f"rank 0 and {rank} differ by {difference:.3g}"


def assert_equal(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-6) -> None:
    """The scenarios' "equal"."""
    difference = float((left - right).abs().max())
    assert difference < tolerance, f"differ by {difference:.3g}"


def summed(tensor: torch.Tensor) -> torch.Tensor:
    return horovod.allreduce(tensor, op=horovod.Sum, name="summed")
