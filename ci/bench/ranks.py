"""What one rank of a benchmark's launch needs: the other ranks, a diary for the launcher, and an alarm for silence."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class HorovodGroup:
    """All ranks, by Horovod."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()

    def gather(self, *values: float) -> list[list[float]]:
        """The values of every rank, in rank order. All ranks return from it at about the same time."""
        row = torch.tensor([values], dtype=torch.float64)
        return self._hvd.allgather(row, name=f"bench.{len(values)}").tolist()

    def close(self) -> None:
        """End on all ranks."""
        self._hvd.shutdown()


class DistributedGroup:
    """All ranks, by torch.distributed over Gloo. horovodrun has started them, but Horovod stays out of the process."""

    def __init__(self, interface: str, address: str, port: int) -> None:
        import torch.distributed

        self._distributed = torch.distributed
        self.rank, self.size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        url = f"tcp://{address}:{port}"
        torch.distributed.init_process_group("gloo", init_method=url, rank=self.rank, world_size=self.size)

    def gather(self, *values: float) -> list[list[float]]:
        """As HorovodGroup's."""
        row = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        self._distributed.all_gather(rows, row)
        return [one.tolist() for one in rows]

    def close(self) -> None:
        """End on all ranks."""
        self._distributed.destroy_process_group()


class Rank:
    """This process, one of a launch.

    Its diary, FOLDER/RANK.jsonl, has one line for everything that happens to a contender. The event `start` without an
    `end` behind it tells the launcher which contender a launch has died of.

    Args:
        settings: of the launch, as `launches.launch` writes them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.settings = settings
        faulthandler.dump_traceback_later(settings["limit"], exit=True)
        if settings["family"] == "ddp":
            self.group: Any = DistributedGroup(settings["interface"], settings["address"], settings["port"])
        else:
            self.group = HorovodGroup()
        self.rank, self.size, self.gather = self.group.rank, self.group.size, self.group.gather
        self._diary = Path(settings["folder"], f"{self.rank}.jsonl").open("a")  # noqa: SIM115

    def note(self, event: str, contender: str, **facts: Any) -> None:
        """One line of the diary."""
        self._diary.write(json.dumps({"event": event, "contender": contender, **facts}) + "\n")
        self._diary.flush()

    def attempt(self, contender: str, action: Callable[[], Any]) -> Any:
        """The result of `action`, or None where it failed on every rank alike. Ranks start it and leave it together.

        A process that is silent for `limit` seconds, here or anywhere, prints its stack and ends, and horovodrun ends
        the others. So does one that fails where others do not.
        """
        self.note("start", contender)
        self.gather(0.0)
        faulthandler.dump_traceback_later(self.settings["limit"], exit=True)
        result, error = None, ""
        try:
            result = action()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            self.note("failed", contender, error=error)
        failed = [row[0] for row in self.gather(float(bool(error)))]
        if 0 < sum(failed) < self.size:
            print(f"{contender} failed on some ranks only; on rank {self.rank}: {error or 'nothing'}", flush=True)
            os._exit(1)
        faulthandler.dump_traceback_later(self.settings["limit"], exit=True)
        self.note("end", contender)
        return result

    def sent_bytes(self) -> int:
        """What this host's network interface has sent since it is there."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, colon, numbers = line.partition(":")
            if colon and name.strip() == self.settings["interface"]:
                return int(numbers.split()[8])
        raise LookupError(f"this host has no network interface {self.settings['interface']!r}")

    def close(self) -> None:
        """The last call."""
        self.group.close()
        faulthandler.cancel_dump_traceback_later()


def started_rank() -> Rank:
    """The rank that this process is: its only argument is the file with the settings."""
    return Rank(json.loads(Path(sys.argv[1]).read_text()))
