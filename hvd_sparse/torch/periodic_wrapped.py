"""The methods of an optimizer whose model is averaged."""

from __future__ import annotations

from typing import Any

import torch

from hvd_sparse.averaging.averager import nothing_to_average
from hvd_sparse.torch.in_place import InPlace, is_broadcasting_state, put_on
from hvd_sparse.torch.rounds import Rounds


class PeriodicallyAveraged(InPlace):
    """Mixed into the class of a wrapped optimizer, in front of the class it had. Alone it does nothing."""

    rounds: Rounds | None
    averaging_request: dict[str, Any] | None

    @property
    def just_averaged(self) -> bool:
        """Whether the last step ended with a round, so that the model is equal on all ranks: the time to commit."""
        return bool(self.rounds and self.rounds.just_averaged)

    @property
    def stopped(self) -> bool:
        """Whether a round has told that some rank called `stop`: leave the loop, and call `finish`."""
        return bool(self.rounds and self.rounds.stopped)

    def stop(self) -> None:
        """Ask all ranks to stop. They hear of it in the next round, see `stopped`."""
        if self.rounds:
            self.rounds.averager.wants_stop = True

    def finish(self) -> None:
        """This rank has no more data. Take part in rounds until that is so everywhere; then all models are equal."""
        if self.rounds:
            self.rounds.finish()

    def count_samples(self, number: int) -> None:
        """So many samples are in the batch of the coming step: for `weights="samples"`."""
        if self.rounds:
            self.rounds.schedule.samples += number

    def flush(self) -> None:
        """With `sparse`: average densely, with all that was not sent so far. On all ranks, right after a round."""
        if self.rounds and self.rounds.averager.settings.sparse:
            self.rounds.flush()

    def metrics(self) -> dict[str, Any]:
        """What averaging did on this rank; keys as in `hvd_sparse.averaging.averager.PeriodicAverager.metrics`."""
        return self.rounds.metrics() if self.rounds else nothing_to_average()

    def averaging_state_dict(self) -> dict[str, Any]:
        """This rank's counters, anchor, outer momentum and residual. Save one per rank, between the same rounds."""
        return self.rounds.save() if self.rounds else {}

    def load_averaging_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what this rank saved. Model and optimizer have files of their own."""
        if self.rounds and saved:
            self.rounds.load(saved)

    def restart_averaging(self) -> None:
        """Ranks have come or gone: the next step begins with the model as it is, which must be equal on all ranks."""
        if self.rounds:
            self.rounds.restart()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in plain PyTorch. The parameters must be the model's."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self.rounds:
            check_parameters(self, self.rounds.averager.replica)

    def close(self) -> None:
        """Average no more, and become the plain optimizer again."""
        self._take_off(rounds=None, averaging_request=None)


def wrap(optimizer: torch.optim.Optimizer, rounds: Rounds | None, request: dict[str, Any]) -> None:
    """Make `optimizer` a `PeriodicallyAveraged` one; see `put_on`."""
    hooks = (_before_step, _after_step) if rounds else None
    put_on(optimizer, PeriodicallyAveraged, {"rounds": rounds, "averaging_request": request}, hooks)


def check_parameters(optimizer: Any, replica: Any) -> None:
    """Raise ValueError unless all parameters of the optimizer are the model's."""
    strangers = sum(p not in replica.names for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise ValueError(f"`model` must have every parameter of the optimizer. Received: a model without {strangers}.")


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if is_broadcasting_state() else optimizer.rounds.before_step(args, kwargs)


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not is_broadcasting_state():
        optimizer.rounds.after_step()
