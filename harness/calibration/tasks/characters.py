"""Character transformer on Python's standard library, at a cool and at a hot learning rate."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from harness.calibration.tasks.problem import Batch, Problem, sinusoids
from harness.calibration.tasks.seams import Norm, Seamed
from harness.workloads.corpus import Corpus, read_corpus

CONTEXT = 32
ROWS = 8
WIDTH = 32
HEADS = 2
NUM_CHARACTERS = 400_000
# A document's place is an integer up to here: above 256 BF16 has no two neighbouring integers.
MAX_PLACE = 960
# Rows of padding before the text, by row modulo 8; a constant share, so that parts of a batch weigh
# the same whatever their number.
PADDING = (0, 0, 0, 12, 0, 0, 0, 20)
NUM_HELD_OUT_ROWS = 96
_REAL_SHARE = 1 - sum(PADDING) / (len(PADDING) * CONTEXT)


class Transformer(Seamed):
    """One causal pre-norm block; returns the mean loss of the characters that are not padding."""

    def __init__(self, *, num_symbols: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_symbols + 1, WIDTH)  # the last one is padding
        self.places = nn.Linear(WIDTH, WIDTH)
        self.norm1, self.norm2, self.norm3 = (Norm(WIDTH) for _ in range(3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, num_symbols, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, symbols: Tensor, targets: Tensor, place: Tensor, padding: Tensor) -> Tensor:
        """Return the loss.

        Args:
            symbols: int64 (rows, length).
            targets: Likewise; ignored where padded.
            place: int64 (rows, length), the place in the document.
            padding: int64 (rows,), how many symbols at the beginning are padding.
        """
        seams = self.seams
        order = torch.arange(symbols.shape[1], device=symbols.device)
        real = order >= padding[:, None]
        # What is padding sees itself alone, so that no row of scores is empty.
        visible = (order[:, None] >= order) & real[:, None, :]
        visible = visible | torch.eye(len(order), dtype=torch.bool, device=symbols.device)
        where = sinusoids(seams["positions"](place), width=WIDTH, shortest=4.0, longest=2048.0)
        x = seams["embedding"](self.tokens.weight, symbols) + self.places(where)
        x = seams["residual"](x, self._attend(self.norm1(x), visible[:, None]))
        x = seams["residual"](x, self.down(torch.relu(self.up(self.norm2(x)))))
        scores = seams["logits"](self.norm3(x), self.head.weight)
        losses = seams["token_losses"](scores.flatten(0, 1), targets.flatten())
        loss: Tensor = seams["reduce_loss"](losses * real.flatten()) / _REAL_SHARE
        return loss

    def _attend(self, x: Tensor, visible: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(x).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.seams["attention_scores"](query, key, (WIDTH // HEADS) ** -0.5)
        weights = self.seams["softmax"](self.seams["mask"](scores, visible))
        mixed = (weights @ value).transpose(1, 2).reshape(rows, length, WIDTH)
        return self.out(mixed)  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _corpus() -> Corpus:
    return read_corpus(None, num_characters=NUM_CHARACTERS)


class Characters(Problem):
    """At two of four places the next character is to be told, at the others the present one.

    Which of the two, only the place in the document tells; a model that cannot tell neighbouring
    places apart has to guess.
    """

    clip = 1.0

    def __init__(self, *, peak_rate: float) -> None:
        self._rate = peak_rate
        self._text = _corpus()
        self.data_sha256 = self._text.sha256
        self.settings = {"version": 2, "peak_rate": peak_rate, "optimizer": "adamw"}

    def build(self) -> nn.Module:
        """Return the transformer."""
        return Transformer(num_symbols=self._text.num_symbols)

    def draw(self, generator: torch.Generator) -> Batch:
        """Return windows at random places of the text: see `Transformer.forward`."""
        starts = torch.randint(len(self._text.train) - CONTEXT, (ROWS, 1), generator=generator)
        offset = torch.randint(MAX_PLACE, (ROWS, 1), generator=generator)
        return self._windows(self._text.train, starts, offset)

    def _windows(self, text: Tensor, starts: Tensor, offset: Tensor) -> Batch:
        order = torch.arange(CONTEXT)
        padding = torch.tensor(PADDING).repeat(-(-len(starts) // len(PADDING)))[: len(starts)]
        place = offset + order
        seen = text[starts + order]
        targets = torch.where(place % 4 < 2, text[starts + order + 1], seen)
        symbols = seen.masked_fill(order < padding[:, None], self._text.num_symbols)
        return symbols, targets, place, padding

    def held_out(self) -> list[Batch]:
        """Return 96 evenly spaced windows of the held-out text (2,688 characters)."""
        text, count = self._text.held_out, NUM_HELD_OUT_ROWS
        starts = torch.arange(count)[:, None] * (len(text) - CONTEXT) // count
        # A stride prime to 4 and to the range meets every phase and every size of place.
        offset = torch.arange(count)[:, None] * 397 % MAX_PLACE
        return [self._windows(text, starts, offset)]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW, with weight decay on matrices only."""
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self._rate, betas=(0.9, 0.98), fused=True)

    def num_items(self, batch: Batch) -> int:
        """Return the characters that are not padding."""
        return int(batch[0].numel() - batch[3].sum())
