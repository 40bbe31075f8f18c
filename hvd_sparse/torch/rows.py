"""Row-sparse gradients (`torch.nn.Embedding(sparse=True)`): the union of rows, without loss."""

from __future__ import annotations

import torch

from hvd_sparse.collectives.requests import AllGather, AllReduce
from hvd_sparse.ops.torch import TorchOps
from hvd_sparse.types import Array, Program, World


def sum_rows(
    world: World, grad: torch.Tensor, force_dense: bool = False
) -> Program[tuple[torch.Tensor, bool, torch.Tensor]]:
    """The coalesced sparse sum over ranks, whether it travelled densely, and whether every rank's rows were finite.

    Duplicates are added on each rank before they are sent. Rows travel as one int32 tensor (capacity, 1 + d), padded
    to a capacity from a short ladder so that shapes repeat; where that is no smaller than a dense allreduce of the
    table, the table travels. Traffic: capacity (1 + d)(P-1) or 2 rows d (P-1)/P words, and one small allgather.

    Args:
        grad: (rows, d) sparse COO tensor with one sparse dimension, float.
        force_dense: Horovod's `sparse_as_dense`.
    """
    ops = TorchOps()
    grad = grad.coalesce()
    rows, width = grad.shape[0], grad[0].numel()
    indices, values = grad.indices().view(-1), grad.values().reshape(-1, width).float()
    counts = yield AllGather(torch.tensor([len(indices)], dtype=torch.int32, device=grad.device), tag="count")
    capacity = ladder(int(counts.max()))
    if force_dense or capacity * (1 + width) >= 2 * rows * width / world.size:
        dense = yield AllReduce(grad.float().to_dense().view(-1), tag="table")
        touched = torch.nonzero(dense.view(rows, width).ne(0).any(1)).view(-1)
        total = dense.view(rows, width)[touched]
        return _sparse(grad, touched, total), True, ops.all_finite(total)
    packed = torch.cat([indices.int().view(-1, 1), values.view(torch.int32)], 1)
    padding = packed.new_zeros((capacity - len(indices), 1 + width))
    gathered = yield AllGather(torch.cat([packed, padding]), tag=f"rows.c{capacity}")
    blocks = [gathered[r * capacity : r * capacity + int(counts[r])] for r in range(world.size)]
    union = torch.unique(torch.cat([block[:, 0] for block in blocks]).long())
    total = values.new_zeros((len(union), width))
    for block in blocks:  # in rank order: equal bits on all ranks
        places = torch.searchsorted(union, block[:, 0].long().contiguous())
        total.index_add_(0, places, block[:, 1:].contiguous().view(torch.float32))
    return _sparse(grad, union, total), False, ops.all_finite(total)


def no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """A row-sparse gradient of a rank that used no row."""
    nowhere = torch.zeros((1, 0), dtype=torch.long, device=parameter.device)
    return torch.sparse_coo_tensor(nowhere, parameter.new_zeros((0, *parameter.shape[1:])), parameter.shape)


def has_nonzero(grad: torch.Tensor) -> bool:
    """Whether any element of a dense or row-sparse gradient differs from zero. Waits for the device."""
    return bool((grad.coalesce().values() if grad.is_sparse else grad).any())


def ladder(count: int) -> int:
    """The smallest of 8, 9, .. 16, 18, .. 32, 36, .. that is at least `count`: at most an eighth is padding.

    >>> [ladder(count) for count in (0, 9, 17, 1000)]
    [8, 9, 18, 1024]
    """
    step = 1 << max(0, (max(count, 8) - 1).bit_length() - 4)
    return max(8, -(-count // step) * step)


def _sparse(like: torch.Tensor, indices: Array, values: Array) -> torch.Tensor:
    shaped = values.reshape(-1, *like.shape[1:]).to(like.dtype)
    return torch.sparse_coo_tensor(indices.view(1, -1), shaped, like.shape, is_coalesced=True)
