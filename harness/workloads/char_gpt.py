"""Character language model: a decoder-only transformer on real text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness.workloads.corpus import Corpus, read_corpus
from harness.workloads.optimization import make_adamw, make_warmup_cosine, seeded
from harness.workloads.settings import CharGptSettings, require

# Bounds the memory of one held-out batch whatever the context.
_HELD_OUT_TOKENS = 4096


class Attention(nn.Module):
    """Pre-norm causal self-attention: the first residual branch of a block."""

    def __init__(self, settings: CharGptSettings) -> None:
        super().__init__()
        self.num_heads = settings.num_heads
        self.norm = nn.LayerNorm(settings.width)
        self.qkv = nn.Linear(settings.width, 3 * settings.width)
        self.out = nn.Linear(settings.width, settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch's output; `x` and it have shape (batch, context, width)."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        # No dropout on the attention weights: fused kernels draw such masks each in its own way.
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.dropout(self.out(mixed))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Pre-norm two-layer perceptron with GELU: the second residual branch of a block."""

    def __init__(self, settings: CharGptSettings) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(settings.width)
        self.up = nn.Linear(settings.width, 4 * settings.width)
        self.down = nn.Linear(4 * settings.width, settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch's output; `x` and it have shape (batch, context, width)."""
        return self.dropout(self.down(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, settings: CharGptSettings) -> None:
        super().__init__()
        self.attn = Attention(settings)
        self.ff = FeedForward(settings)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to `x` of shape (batch, context, width)."""
        x = x + self.attn(x)
        return x + self.ff(x)  # type: ignore[no-any-return]


class CharGpt(nn.Module):
    """Decoder-only transformer with learned positions (GPT-2's layout, Radford et al. 2019)."""

    def __init__(self, settings: CharGptSettings, *, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, settings.width)
        self.positions = nn.Embedding(settings.context, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.num_layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, vocabulary_size, bias=False)
        if settings.tie_embeddings:
            self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=settings.init_std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, symbols: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary) for int64 `symbols` (batch, length)."""
        x = self.dropout(self.tokens(symbols) + self.positions.weight[: symbols.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class CharGptWorkload:
    """The character language model as a `Workload`; a batch is a pair (symbols, next symbols)."""

    loss_unit = "nats"

    def __init__(self, settings: CharGptSettings) -> None:
        self._settings = settings
        self._corpus = read_corpus(settings.text, num_characters=settings.num_characters)
        self._vocabulary_size = settings.vocabulary_size or self._corpus.num_symbols
        _check_sizes(settings, self._corpus)
        self.name = settings.name or settings.kind
        self.clip = settings.clip
        self.default_steps = settings.steps
        self.data_sha256 = self._corpus.sha256
        self.description = settings.description or (
            f"Character language model: {settings.num_layers} layers, width {settings.width}, "
            f"context {settings.context}, on {self._corpus.source}"
        )
        self.settings: dict[str, Any] = {
            **settings.recorded(),
            "name": self.name,
            "loss_unit": self.loss_unit,
            "num_symbols": self._corpus.num_symbols,
        }

    def build_model(self, seed: int) -> nn.Module:
        """Return the model; the global generators are left as they were."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return CharGpt(self._settings, vocabulary_size=self._vocabulary_size)

    def batches(self, seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield windows at random places of the training text; int64 (batch_size, context)."""
        generator = seeded(seed)
        context, text = self._settings.context, self._corpus.train
        offsets = torch.arange(context + 1)
        for _ in range(steps):
            starts = torch.randint(
                len(text) - context, (self._settings.batch_size, 1), generator=generator
            )
            windows = text[starts + offsets]
            yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def loss_fn(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy per character, in nats."""
        symbols, targets = batch
        return F.cross_entropy(
            model(symbols).flatten(0, 1),
            targets.flatten(),
            label_smoothing=self._settings.label_smoothing,
        )

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW."""
        return make_adamw(model, self._settings)

    def make_scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        """Return warm-up and cosine decay over `steps`."""
        return make_warmup_cosine(optimizer, steps=steps, settings=self._settings)

    def held_out(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Return evenly spaced windows of the held-out text, the same for every seed."""
        del seed
        context, text = self._settings.context, self._corpus.held_out
        places = len(text) - context  # first characters of windows that fit
        count = min(self._settings.num_held_out, places)
        starts = torch.arange(count)[:, None] * places // count
        windows = text[starts + torch.arange(context + 1)]
        chunk = max(1, _HELD_OUT_TOKENS // context)
        parts = [windows[k : k + chunk] for k in range(0, count, chunk)]
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]

    def eval_fn(self, model: nn.Module) -> None:
        """Return None: the held-out loss is the figure."""

    def num_items(self, batch: tuple[Tensor, Tensor]) -> int:
        """Return the predicted characters."""
        return batch[1].numel()

    def num_tokens(self, batch: tuple[Tensor, Tensor]) -> int:
        """Return the characters read."""
        return batch[0].numel()


def _check_sizes(settings: CharGptSettings, corpus: Corpus) -> None:
    shortest = min(len(corpus.train), len(corpus.held_out))
    if shortest <= settings.context:
        raise ValueError(
            f"workload.text={settings.text} is too short: its held-out tenth has "
            f"{len(corpus.held_out)} characters, but workload.context={settings.context} needs "
            f"at least {settings.context + 1}"
        )
    require(
        settings.vocabulary_size is None or settings.vocabulary_size >= corpus.num_symbols,
        "vocabulary_size",
        settings.vocabulary_size,
        f"{corpus.num_symbols} (the text's symbols) or more, or null",
    )
