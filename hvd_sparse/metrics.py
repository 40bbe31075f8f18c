"""What `opt.metrics()` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Running totals of one rank. `as_dict` documents the keys that users see."""

    scheme: str
    density: float = 1.0
    reason: str = ""
    bytes_dense: float = 0.0
    num_exchanges: int = 0
    exchange_seconds: float = 0.0
    exposed_seconds: float = 0.0
    skipped_steps: int = 0
    sparse_gradients: dict[str, str] = field(default_factory=dict)
    factors: dict[str, str] = field(default_factory=dict)

    def add(self, density: float, num_bytes_dense: float, seconds: float, exposed_seconds: float) -> None:
        """Count one exchange."""
        self.num_exchanges += 1
        self.density = density
        self.bytes_dense += num_bytes_dense
        self.exchange_seconds += seconds
        self.exposed_seconds += exposed_seconds

    def as_dict(self, bytes_sent: float, residual_norm: float) -> dict[str, Any]:
        """The metrics of one rank since its optimizer was wrapped.

        Keys:
            scheme: what is exchanged, in words.
            density: share of entries in the last exchange of a compressed bucket.
            bytes_sent: bytes this rank sent (allreduce: 2m(P-1)/P, allgather: what it receives from the others).
            bytes_dense: what dense allreduces would have sent for the same exchanges.
            num_exchanges: exchanges of the whole model.
            exchange_seconds: from the start of an exchange's first bucket to the end of its last, summed.
            exposed_seconds: the part of it that was not hidden behind the backward pass.
            residual_norm: 2-norm of what has not been sent yet on this rank.
            skipped_steps: exchanges whose result was not applied: not finite, or thrown away before the step.
            sparse_gradients: parameter name -> "rows" or "dense", for embeddings with sparse gradients.
            factors: parameter name -> "factors" or "whole": how a layer that may be sent as factors travelled last.
            reason: why this density, in words.
        """
        return {
            "scheme": self.scheme,
            "density": self.density,
            "bytes_sent": int(bytes_sent),
            "bytes_dense": int(self.bytes_dense),
            "num_exchanges": self.num_exchanges,
            "exchange_seconds": self.exchange_seconds,
            "exposed_seconds": self.exposed_seconds,
            "residual_norm": residual_norm,
            "skipped_steps": self.skipped_steps,
            "sparse_gradients": dict(self.sparse_gradients),
            "factors": dict(self.factors),
            "reason": self.reason,
        }
