"""What the speed benchmarks train: models, their data and hyper-parameters that suit dense training.

Every rank draws its own batches from the whole training set, in an order that depends on the seed and its number. The
data are files of Debian packages.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from datasets import DataError, fashion_mnist

GCIDE = Path("/usr/share/dictd/gcide.dict.dz")
GCIDE_BYTES = 10_000_000  # a quarter of the dictionary: 1.5 million words, read in half a second
Batch = tuple[torch.Tensor, ...]


class Workload:
    """One model with its data.

    Attributes:
        seed: of the weights and of the order of batches.
        learning_rate: from step `rising_steps` on; before that it rises from zero.
        num_steps: so long is the training, at whose end the learning rate has fallen to zero. None: it stays. (With a
            constant rate accuracies jump by half a point from step to step.)
        momentum: of SGD.
        metric: what `evaluate` measures.
        goal: what training shall reach: at least so much if `higher`, else at most.
    """

    seed = 0
    learning_rate = 0.05
    rising_steps = 20
    num_steps: int | None = None
    momentum = 0.9
    metric = "loss"
    higher = False
    goal: float | None = None

    def make_model(self) -> nn.Module:
        """With weights that are equal on every rank."""
        raise NotImplementedError

    def batches(self, rank: int) -> Iterator[Batch]:
        """Without end."""
        raise NotImplementedError

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        """The training loss, averaged over the batch."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, rank: int, size: int) -> tuple[float, float]:
        """Sum of the metric over this rank's share of the test examples, and their number."""
        raise NotImplementedError

    def reached(self, value: float) -> bool:
        """Whether this value of the metric is as good as the goal."""
        return self.goal is not None and (value >= self.goal if self.higher else value <= self.goal)

    def factor(self, step: int) -> float:
        """The learning rate at this step, as a share of `learning_rate`."""
        rest = 1 - step / (self.num_steps + 1) if self.num_steps else 1.0
        return min(1.0, (step + 1) / self.rising_steps) * rest

    def order(self, rank: int) -> int:
        """The seed of this rank's batches."""
        return 1000 * self.seed + rank


class Mlp(Workload):
    """784-2048-1024-10 on Fashion-MNIST: 3.7 million parameters."""

    batch_size = 64
    num_tests = 4000
    metric = "accuracy"
    higher = True
    goal = 0.85

    def make_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return model

    def batches(self, rank: int) -> Iterator[Batch]:
        images, labels = _images("train")
        for chosen in _shuffled(len(images), self.batch_size, self.order(rank)):
            yield images[chosen], labels[chosen]

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, rank: int, size: int) -> tuple[float, float]:
        images, labels = (part[rank : self.num_tests : size] for part in _images("test"))
        with torch.no_grad():
            correct = sum(
                int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True)
            )
        return float(correct), float(len(labels))


class Lstm(Workload):
    """A word-level language model on a dictionary: 5.2 million parameters, of which most are in the two vocabularies.

    Eight sequences of sixteen words per rank and step: computation must not hide the network on two cores.
    """

    num_words = 10_000
    batch_size = 8
    length = 16
    num_tests = 384
    learning_rate = 1.0
    goal = 5.4

    def make_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return LanguageModel(self.num_words, embedding=288, hidden=192)

    def windows(self) -> torch.Tensor:
        """The text, cut into sequences and the word that follows each."""
        words = _text(self.num_words)
        width = self.length + 1
        return words[: len(words) // width * width].view(-1, width)

    def batches(self, rank: int) -> Iterator[Batch]:
        windows = self.windows()
        windows = windows[torch.arange(len(windows)) % 50 != 0]
        for chosen in _shuffled(len(windows), self.batch_size, self.order(rank)):
            yield (windows[chosen],)

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        (windows,) = batch
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def evaluate(self, model: nn.Module, rank: int, size: int) -> tuple[float, float]:
        windows = self.windows()[::50]
        stride = len(windows) // self.num_tests
        windows = windows[::stride][: self.num_tests][rank::size]
        with torch.no_grad():
            losses = sum(float(self.loss(model, (part,))) * len(part) for part in windows.split(32))
        return losses, float(len(windows))


class LanguageModel(nn.Module):
    """Embedding, one LSTM layer, scores of all words."""

    def __init__(self, num_words: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.scores = nn.Linear(hidden, num_words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(self.lstm(self.embedding(words))[0])
        return scores


class Embedding(Workload):
    """Skip-gram word vectors with negative samples: two tables with 3.8 million parameters, little computation."""

    num_words = 30_000
    batch_size = 512
    num_negatives = 5
    window = 4
    learning_rate = 1.0
    sparse = False

    def make_model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return WordVectors(self.num_words, 64, self.sparse)

    def batches(self, rank: int) -> Iterator[Batch]:
        words = _text(self.num_words)
        frequencies = torch.bincount(words, minlength=self.num_words).float() ** 0.75
        generator = torch.Generator().manual_seed(1000 + self.order(rank))
        for centers in _shuffled(len(words) - 2 * self.window, self.batch_size, self.order(rank)):
            offsets = torch.randint(1, self.window + 1, centers.shape, generator=generator)
            negatives = torch.multinomial(
                frequencies, self.batch_size * self.num_negatives, replacement=True, generator=generator
            )
            others = torch.cat([words[centers + offsets, None], negatives.view(self.batch_size, -1)], 1)
            yield words[centers], others

    def loss(self, model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
        scores = model(*batch)  # (batch, 1 + negatives), the true neighbour first
        signs = torch.ones(scores.shape[1]).neg()
        signs[0] = 1
        return -F.logsigmoid(scores * signs).sum(1).mean()


class EmbeddingRows(Embedding):
    """The same with gradients that consist of rows, `torch.nn.Embedding(sparse=True)`."""

    momentum = 0.0  # SGD with momentum does not take such gradients
    sparse = True


class WordVectors(nn.Module):
    """One vector for a word in the middle, another one for a word nearby."""

    def __init__(self, num_words: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.centers = nn.Embedding(num_words, width, sparse=sparse)
        self.others = nn.Embedding(num_words, width, sparse=sparse)

    def forward(self, centers: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self.others(others), self.centers(centers)[:, :, None]).squeeze(2) / self.centers.embedding_dim


WORKLOADS: dict[str, type[Workload]] = {
    "mlp": Mlp,
    "lstm": Lstm,
    "embedding": Embedding,
    "embedding-rows": EmbeddingRows,
}


def _shuffled(number: int, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches of indices, another order in every pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(number, generator=generator).split(batch_size)[: number // batch_size]


@cache
def _images(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = fashion_mnist(split)
    pixels = torch.from_numpy(images).float().div(255).sub(0.2860).div(0.3530)  # their mean and deviation
    return pixels.flatten(1), torch.from_numpy(labels).long()


@cache
def _text(num_words: int) -> torch.Tensor:
    """The beginning of a dictionary of English as numbers of words, by frequency; 0 stands for those left out."""
    if not GCIDE.is_file():
        raise DataError(f"There is no file {GCIDE}. Install its Debian package: sudo apt-get install -y dict-gcide")
    with gzip.open(GCIDE) as file:
        text = file.read(GCIDE_BYTES).decode("utf-8", "replace").lower()
    words = re.findall(r"[a-z]+|[.,;:()?!]", re.sub(r"\[[^\[\]]*\]", " ", text))  # without sources and pronunciations
    frequent = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))[: num_words - 1]
    numbers = {word: number for number, (word, _) in enumerate(frequent, start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def find(name: str) -> Any:
    """The workload of this name."""
    return WORKLOADS[name]()
