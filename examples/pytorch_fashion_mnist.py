"""Fashion-MNIST with Horovod, PyTorch and sparse gradients.

    horovodrun -np 2 python examples/pytorch_fashion_mnist.py                  # sends as much as the network can take
    horovodrun -np 2 python examples/pytorch_fashion_mnist.py --density 0.01   # 1 % of the gradient entries
    horovodrun -np 2 python examples/pytorch_fashion_mnist.py --dense          # Horovod's own path, to compare
    python examples/pytorch_fashion_mnist.py                                   # one process

A Horovod script in its usual shape. What differs from one without hvd_sparse is the import and the `compression`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import FASHION_MNIST, DataError, fashion_mnist
from results import save, show
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import hvd_sparse.torch as hvd  # was: import horovod.torch as hvd
from hvd_sparse.memories.momentum import Momentum


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--density", type=float, help="share of the gradient entries that is sent (default: it follows the network)")
    add("--sparsifier", default="threshold", help="which entries: threshold, topk, leader, random_block (%(default)s)")
    add("--collective", help="how their sum travels: owner_reduce, allgather, shared_allreduce (what fits best)")
    add("--wire", choices=["fp32", "fp16", "compact"], help="how entries are written, in 8, 6 or 4 bytes (fp32)")
    add("--memory", default="momentum", help="what becomes of the others: momentum, residual, none (%(default)s)")
    add("--warmup-steps", type=int, default=0, help="steps over which the density falls to --density (%(default)s)")
    add("--dense", action="store_true", help="Horovod's own dense allreduce instead")
    add("--epochs", type=int, default=3, help="(%(default)s)")
    add("--steps", type=int, help="stop after so many steps, for a short run")
    add("--batch-size", type=int, default=64, help="per rank (%(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of one rank; multiplied by their number (%(default)s)")
    add("--lr-warmup-steps", type=int, default=100, help="steps until that product is reached (%(default)s)")
    add("--momentum", type=float, default=0.9, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of the initial weights and of the order of the data (%(default)s)")
    add("--data", type=Path, default=FASHION_MNIST, metavar="DIR", help="folder of the IDX files (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--bar", action=argparse.BooleanOptionalAction, help="progress bar (default: if stderr is a terminal)")
    args = parser.parse_args()
    if min(args.epochs, args.batch_size) < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--epochs, --batch-size and --steps must be 1 or more")
    return args


def load(split, directory):
    images, labels = fashion_mnist(split, directory)
    images = torch.from_numpy(images).float().div(255).sub(0.2860).div(0.3530)  # mean and deviation of the pixels
    return TensorDataset(images.flatten(1), torch.from_numpy(labels).long())


def make_batches(dataset, batch_size, *, train, seed=0):
    """This rank's share of the data, another order each epoch when training: equally many batches on every rank."""
    if train:
        sampler = DistributedSampler(dataset, hvd.size(), hvd.rank(), shuffle=True, seed=seed, drop_last=True)
    else:
        sampler = range(hvd.rank(), len(dataset), hvd.size())
    # Tensors are indexed by a whole batch at a time, which is many times faster than collecting single images.
    return DataLoader(dataset, sampler=BatchSampler(sampler, batch_size, drop_last=train), batch_size=None)


def make_optimizer(args, model):
    """SGD, wrapped: gradients are averaged over ranks, sparsely unless --dense."""
    momentum = args.momentum
    if args.dense:
        compression = hvd.Compression.none
    else:
        memory = args.memory
        if memory == "momentum":  # it applies the momentum, and before it selects: the optimizer must not do it again
            memory, momentum = Momentum(args.momentum), 0.0
        parts = {
            "sparsifier": args.sparsifier, "collective": args.collective, "wire": args.wire, "memory": memory
        }  # fmt: skip
        if args.density is None:
            compression = hvd.Compression.adaptive(**parts)
        else:
            compression = hvd.Compression.sparse(args.density, warmup_steps=args.warmup_steps, **parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=momentum)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)


def density_in_words(args):
    return "adaptive density" if args.density is None else f"density {args.density:g}"


def make_schedule(args, optimizer, num_steps):
    """The learning rate rises from that of one rank to that of all of them, then falls to zero at the last step."""
    num_rising = min(args.lr_warmup_steps, num_steps // 2)

    def factor(step):
        rising = min(1.0, step / max(1, num_rising))
        falling = min(1.0, (num_steps - step) / max(1, num_steps - num_rising))
        return (1 + (hvd.size() - 1) * rising) * falling

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def evaluate(model, batches, device):
    """Loss and accuracy on the whole test set: every rank takes its share, and the counts are summed."""
    model.eval()
    counts = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for images, labels in batches:
            scores = model(images.to(device)).cpu()
            loss = F.cross_entropy(scores, labels, reduction="sum")
            counts += torch.stack([loss, (scores.argmax(1) == labels).sum(), torch.tensor(len(labels))])
    model.train()
    loss, correct, number = hvd.allreduce(counts, op=hvd.Sum, name="test").tolist()
    return loss / number, correct / number


def train(args, model, optimizer, batches, test_batches, device):
    """Returns the loss of every step (mean over ranks), the test metrics after every epoch, and seconds of training."""
    num_steps = min(args.epochs * len(batches), args.steps or sys.maxsize)
    schedule = make_schedule(args, optimizer, num_steps)
    losses, tests, seconds = [], [], 0.0
    with_bar = sys.stderr.isatty() if args.bar is None else args.bar
    bar = tqdm(total=num_steps, disable=hvd.rank() != 0 or not with_bar, ncols=80, unit="step", mininterval=0.5)
    for epoch in range(args.epochs):
        batches.sampler.sampler.set_epoch(epoch)
        started = time.perf_counter()
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            bar.update()
            if len(losses) == num_steps:
                break
        epoch_loss = torch.stack(losses[-len(batches) :]).mean().item()  # waits for the device: now the time is right
        seconds += time.perf_counter() - started
        test_loss, accuracy = evaluate(model, test_batches, device)
        tests.append({"step": len(losses), "loss": test_loss, "accuracy": accuracy})
        bar.set_postfix_str(f"test {accuracy:.1%}")
        if hvd.rank() == 0 and not with_bar:
            print(
                f"epoch {epoch + 1}, step {len(losses)} of {num_steps}: {seconds:.1f} s, training loss "
                f"{epoch_loss:.3f}, test loss {test_loss:.3f}, test accuracy {accuracy:.2%}",
                flush=True,
            )
        if len(losses) == num_steps:
            break
    bar.close()
    losses = hvd.allreduce(torch.stack(losses).cpu(), name="losses").tolist()
    return losses, tests, seconds


def count_bytes(args, model, optimizer):
    """What this rank sent per step, and what a dense ring allreduce of every gradient sends."""
    dense = 8 * sum(p.numel() for p in model.parameters()) * (hvd.size() - 1) / hvd.size()
    if args.dense:
        return dense, dense
    metrics = optimizer.metrics()
    return metrics["bytes_sent"] / max(1, metrics["num_exchanges"]), dense


def print_table(results):
    sent, dense = results["bytes_per_step"], results["dense_bytes_per_step"]
    share = f" ({sent / dense:.2%} of dense)" if dense else ""
    rows = {
        "exchange": results["mode"],
        "ranks": results["ranks"],
        "steps": results["steps"],
        "test accuracy": f"{results['test_accuracy']:.2%}",
        "test loss": f"{results['test_loss']:.4f}",
        "seconds of training": f"{results['seconds']:.1f}",
        "sent per step and rank": f"{sent / 1e6:.3f} MB{share}",
    }
    show(rows)


def main():
    args = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)  # ranks share the machine's cores
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    try:
        training_set, test_set = load("train", args.data), load("test", args.data)
    except DataError as error:
        sys.exit(f"error: {error}")
    batches = make_batches(training_set, args.batch_size, train=True, seed=args.seed)
    test_batches = make_batches(test_set, 500, train=False)
    if not len(batches):
        sys.exit(f"error: {len(training_set)} images are less than one batch of {args.batch_size} for every rank.")

    torch.manual_seed(args.seed)
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    ).to(device)  # fmt: skip
    optimizer = make_optimizer(args, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    losses, tests, seconds = train(args, model, optimizer, batches, test_batches, device)
    bytes_per_step, dense_bytes_per_step = count_bytes(args, model, optimizer)
    if hvd.rank() != 0:
        return
    results = {
        "mode": "dense" if args.dense else f"sparse, {density_in_words(args)}, {args.sparsifier}, {args.memory}",
        "ranks": hvd.size(),
        "steps": len(losses),
        "test_accuracy": tests[-1]["accuracy"],
        "test_loss": tests[-1]["loss"],
        "seconds": seconds,
        "bytes_per_step": bytes_per_step,
        "dense_bytes_per_step": dense_bytes_per_step,
        "loss_per_step": losses,
        "tests": tests,
        "arguments": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
    }
    print_table(results)
    save(args.json, results)


if __name__ == "__main__":
    main()
