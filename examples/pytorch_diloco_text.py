"""A small language model on text with DiLoCo: ranks train alone, and an outer optimizer steps along what they averaged.

    horovodrun -np 4 python examples/pytorch_diloco_text.py --steps 600
    horovodrun -np 4 python examples/pytorch_diloco_text.py --steps 600 --mode mean            # no outer optimizer
    horovodrun -np 4 python examples/pytorch_diloco_text.py --steps 600 --mode sync            # dense, in every step
    horovodrun -np 4 python examples/pytorch_diloco_text.py --steps 600 --density 0.05         # sparse deltas
    python examples/pytorch_diloco_text.py --steps 600                                         # one process

The text is the GCIDE dictionary (`sudo apt-get install dict-gcide`), or the source of Python's own library where that
is not installed. The model is a transformer that predicts the next byte; every rank reads its own share of the text.
The table says what was sent, and what an average of the gradients in every step would have sent.

Reference: A. Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, arXiv:2311.08105.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import DataError
from results import save, show
from torch import nn
from tqdm import tqdm

import hvd_sparse.torch as hvd  # was: import horovod.torch as hvd

GCIDE = Path("/usr/share/dictd/gcide.dict.dz")
NUM_BYTES = 20_000_000  # of the text
TEST_SHARE = 50  # one byte in so many, from the end, is for the test
TEST_WINDOWS = 128


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=("diloco", "mean", "sync"), default="diloco", help="what is averaged: models, and then an"
        " outer step is taken; models; gradients, densely in every step (%(default)s)")  # fmt: skip
    add("--steps", type=int, default=600, help="of each rank (%(default)s)")
    add("--every-steps", type=int, default=50, help="between averages (%(default)s)")
    add("--outer-lr", type=float, default=0.7, help="(%(default)s)")
    add("--outer-momentum", type=float, default=0.9, help="Nesterov's (%(default)s)")
    add("--density", type=float, help="send this share of each change of the model (everything)")
    add("--lr", type=float, default=0.001, help="of AdamW (%(default)s)")
    add("--lr-warmup-steps", type=int, default=50, help="over which it rises (%(default)s)")
    add("--batch-size", type=int, default=16, help="windows per rank (%(default)s)")
    add("--length", type=int, default=64, help="bytes in a window (%(default)s)")
    add("--width", type=int, default=96, help="of the model (%(default)s)")
    add("--layers", type=int, default=2, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of the initial weights and of the windows (%(default)s)")
    add("--data", type=Path, metavar="FILE", help="a text, gzipped if its name ends in .gz or .dz (GCIDE)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--bar", action=argparse.BooleanOptionalAction, help="progress bar (default: if stderr is a terminal)")
    args = parser.parse_args()
    if min(args.steps, args.every_steps, args.batch_size, args.length, args.layers) < 1:
        parser.error("--steps, --every-steps, --batch-size, --length and --layers must be 1 or more")
    if args.width < 4 or args.width % 4:
        parser.error(f"--width must be a multiple of 4, the number of heads. Received: {args.width}")
    if args.density is not None and args.mode == "sync":
        parser.error("--density is for the modes diloco and mean")
    return args


def read_text(path):
    """At most NUM_BYTES as uint8, and where they come from."""
    if path is None and not GCIDE.exists():
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(file for file in folder.rglob("*.py") if "site-packages" not in file.parts)
        text, source = b"\n".join(file.read_bytes() for file in files), str(folder)
    else:
        source = path or GCIDE
        try:
            text = Path(source).read_bytes()
            text = gzip.decompress(text) if Path(source).suffix in (".gz", ".dz") else text
        except (OSError, EOFError, gzip.BadGzipFile) as error:
            raise DataError(f"{source} cannot be read: {error}. Give another text with --data FILE.") from error
    return torch.frombuffer(bytearray(text[:NUM_BYTES]), dtype=torch.uint8), str(source)


def windows(text, starts, length):
    """(len(starts), length + 1) bytes as numbers."""
    return text[starts[:, None] + torch.arange(length + 1)].long()


class LanguageModel(nn.Module):
    """A transformer over bytes that sees only what came before."""

    def __init__(self, width, layers, length):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text):
        hidden = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return self.scores(self.layers(hidden, self.mask[: text.shape[1], : text.shape[1]], is_causal=True))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def wrap(args, model):
    """AdamW, whose model or gradients are averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if args.mode == "sync":
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.Compression.none)
    outer = hvd.OuterSGD(args.outer_lr, args.outer_momentum, nesterov=True) if args.mode == "diloco" else None
    sparse = hvd.Compression.sparse(args.density) if args.density else None
    return hvd.PeriodicAveraging(optimizer, model, every_steps=args.every_steps, outer=outer, sparse=sparse)


def train(args, model, optimizer, text, device):
    """The loss of every step, and seconds."""
    length = args.length
    generator = torch.Generator().manual_seed(args.seed * hvd.size() + hvd.rank())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / args.lr_warmup_steps))
    with_bar = sys.stderr.isatty() if args.bar is None else args.bar
    bar = tqdm(total=args.steps, disable=hvd.rank() != 0 or not with_bar, ncols=80, unit="step", mininterval=0.5)
    losses, started = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - length, (args.batch_size,), generator=generator)
        batch = windows(text, starts, length).to(device)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
        bar.update()
        if hvd.rank() == 0 and not with_bar and (step % args.every_steps == 0 or step == args.steps):
            print(f"step {step} of {args.steps}: loss {losses[-1]:.3f}", flush=True)
    if args.mode != "sync":
        optimizer.finish()
    bar.close()
    return losses, time.perf_counter() - started


@torch.no_grad()
def evaluate(model, text, length, device):
    """Mean loss on windows that are spread over the test text."""
    starts = torch.linspace(0, len(text) - length - 1, TEST_WINDOWS).long()
    parts = windows(text, starts, length).split(32)
    return sum(loss_of(model, part.to(device)).item() * len(part) for part in parts) / TEST_WINDOWS


def main():
    args = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)  # ranks share the machine's cores
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        text, source = read_text(args.data)
    except DataError as error:
        sys.exit(f"error: {error}")
    text, test_text = text[: -(len(text) // TEST_SHARE)], text[-(len(text) // TEST_SHARE) :]
    share = len(text) // hvd.size()
    if min(share, len(test_text)) <= args.length:
        sys.exit(f"error: {source} is too short for windows of --length {args.length} on {hvd.size()} ranks.")
    own_text = text[hvd.rank() * share : (hvd.rank() + 1) * share]

    torch.manual_seed(args.seed)
    model = LanguageModel(args.width, args.layers, args.length).to(device)
    optimizer = wrap(args, model)
    losses, seconds = train(args, model, optimizer, own_text, device)
    if hvd.rank() != 0:
        return
    num_parameters = sum(p.numel() for p in model.parameters())
    dense = args.steps * 8 * num_parameters * (hvd.size() - 1) / hvd.size()  # a ring allreduce in every step
    metrics = {} if args.mode == "sync" else optimizer.metrics()
    sent = metrics.get("bytes_sent", dense)
    loss = evaluate(model, test_text, args.length, device)
    results = {
        "mode": args.mode,
        "ranks": hvd.size(),
        "parameters": num_parameters,
        "steps": args.steps,
        "rounds": metrics.get("num_rounds", 0),
        "seconds": seconds,
        "waiting_seconds": metrics.get("waiting_seconds"),
        "test_loss": loss,
        "bytes_per_rank": sent,
        "dense_bytes_per_rank": dense,
        "loss_per_step": losses,
    }
    fewer = f" ({dense / sent:.0f} times less than {dense / 1e6:.1f} MB)" if sent and args.mode != "sync" else ""
    rows = {
        "text": source,
        "mode": args.mode if args.density is None else f"{args.mode}, density {args.density:g}",
        "ranks": hvd.size(),
        "parameters": f"{num_parameters:,}",
        "steps of each rank": args.steps,
        "averages of the model": results["rounds"],
        "seconds of training": f"{seconds:.1f}",
        "sent per rank": f"{sent / 1e6:.2f} MB{fewer}",
        "test loss": f"{loss:.4f} nats per byte",
    }
    show(rows)
    save(args.json, results)


if __name__ == "__main__":
    main()
