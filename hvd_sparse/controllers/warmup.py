"""Exponential density warm-up."""

from __future__ import annotations

from hvd_sparse.controllers import Plan, Seen
from hvd_sparse.types import State, check_count, check_density


class Warmup:
    """Start dense-ish and sharpen: stage s of S uses density ** ((s + 1) / (S + 1)), then `density`.

    Choose it for densities under 0.01 and with momentum correction: early gradients change fast.

    Args:
        density: the final one, in (0, 1].
        warmup_steps: exchanges until then; five epochs' worth in the paper.
        num_stages: distinct densities on the way.

    Raises:
        ValueError: an argument is out of range.

    Reference: Y. Lin et al., Deep Gradient Compression, ICLR 2018, arXiv:1712.01887, section 3.3.

    Example:
        >>> [round(Warmup(0.001, 10).decide(Seen(step), {})[0].density, 6) for step in (0, 2, 9, 10)]
        [0.316228, 0.1, 0.003162, 0.001]
    """

    def __init__(self, density: float, warmup_steps: int, num_stages: int = 5) -> None:
        self.density = check_density(density)
        self.warmup_steps = check_count(warmup_steps, "warmup_steps")
        self.num_stages = check_count(num_stages, "num_stages")

    def init(self) -> State:
        return {}

    def ladder(self) -> tuple[float, ...]:
        return (*(self._density(stage) for stage in range(self.num_stages)), self.density)

    def decide(self, seen: Seen, state: State) -> tuple[Plan, State]:
        if seen.step >= self.warmup_steps:
            return Plan(self.density, f"density {self.density:g}, warm-up is over"), state
        stage = seen.step * self.num_stages // self.warmup_steps
        return Plan(self._density(stage), f"warm-up stage {stage + 1} of {self.num_stages}"), state

    def _density(self, stage: int) -> float:
        return self.density ** ((stage + 1) / (self.num_stages + 1))
