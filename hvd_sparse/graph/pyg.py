"""Batches as PyTorch Geometric knows them: the one file of this folder that needs a framework, when it is called."""

from __future__ import annotations

from typing import Any

from hvd_sparse.graph.sampler import Batch


def to_pyg(batch: Batch, **arrays: Any) -> Any:
    """A torch_geometric.data.Data with edge_index (2, e), n_id (n,), batch_size and the rows of `arrays`.

    Args:
        batch: n nodes, e edges. As with PyG's own loaders, n_id are its nodes and the first batch_size are the seeds.
        arrays: x=features, y=labels and the like: (N, ...) for all nodes of the sampler's graph, NumPy (mapped or not)
            or CPU tensors. Only the batch's rows are read.

    Raises:
        ImportError: PyTorch Geometric is not installed.
    """
    try:
        import torch
        from torch_geometric.data import Data
    except ImportError as error:
        raise ImportError("to_pyg needs PyTorch Geometric: pip install 'hvd-sparse[gnn]'") from error
    nodes = torch.from_numpy(batch.nodes)
    edges = torch.stack([torch.from_numpy(batch.edge_src), torch.from_numpy(batch.edge_dst)])
    rows = {
        name: values[nodes] if isinstance(values, torch.Tensor) else torch.from_numpy(values[batch.nodes])
        for name, values in arrays.items()
    }
    return Data(edge_index=edges, n_id=nodes, num_nodes=len(nodes), batch_size=batch.num_seeds, **rows)
