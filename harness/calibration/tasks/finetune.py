"""Fine-tuning from a trained state at a small learning rate: digits, upright, then mirrored."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from harness.calibration.tasks import schedules
from harness.calibration.tasks.digits import SIDE, drawn, read_digits, shifted
from harness.calibration.tasks.problem import Batch, Problem
from harness.calibration.tasks.seams import Norm, Seamed

WIDTH = 48
BATCH = 32
NUM_CLASSES = 10
_TRAINED_STEPS = 250
_TRAINED_RATE = 5e-3
_TRAINED_SEED = 0
_HELD_OUT_SHIFTS = (0, 2, 4, 8)


class Perceptron(Seamed):
    """Linear, norm, ReLU, a residual layer, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIDE**2, WIDTH)
        self.norm = Norm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss for FP32 `images` (batch, 64)."""
        seams = self.seams
        x = torch.relu(self.norm(self.first(images)))
        x = seams["residual"](x, torch.relu(self.second(x)))
        scores = seams["logits"](x, self.head.weight) + self.head.bias
        loss: Tensor = seams["reduce_loss"](seams["token_losses"](scores, labels))
        return loss


class FineTuning(Problem):
    """All seeds start from one trained state; a seed is the order of the examples."""

    warmup = 10

    def __init__(self) -> None:
        digits = read_digits()
        self._upright = shifted(digits.images).flatten(2), digits.labels
        self._train = shifted(digits.images.flip(-1)).flatten(2), digits.labels
        images = shifted(digits.held_out_images.flip(-1)).flatten(2)[list(_HELD_OUT_SHIFTS)]
        self._held_out = images.flatten(0, 1), digits.held_out_labels.repeat(len(images))
        self.data_sha256 = digits.sha256
        self.settings = {"version": 2, "peak_rate": 3e-4, "optimizer": "adam"}

    def build(self) -> nn.Module:
        """Return the net in its trained state."""
        model = Perceptron()
        model.load_state_dict(self._trained())
        return model

    @lru_cache(maxsize=1)  # noqa: B019 - one problem lives as long as the process
    def _trained(self) -> dict[str, Tensor]:
        torch.manual_seed(_TRAINED_SEED)
        generator = torch.Generator().manual_seed(_TRAINED_SEED)
        model = Perceptron()
        optimizer = Adam(model.parameters(), lr=_TRAINED_RATE, fused=True)
        with torch.enable_grad():
            for step in range(_TRAINED_STEPS):
                rate = schedules.cosine(step, _TRAINED_STEPS, warmup=1)
                optimizer.param_groups[0]["lr"] = _TRAINED_RATE * rate
                batch = drawn(*self._upright, size=BATCH, generator=generator)
                optimizer.zero_grad()
                model(*batch).backward()
                optimizer.step()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}

    def draw(self, generator: torch.Generator) -> Batch:
        """Return 32 mirrored images and their digits."""
        return drawn(*self._train, size=BATCH, generator=generator)

    def held_out(self) -> list[Batch]:
        """Return 597 mirrored images in four shifts (2,388)."""
        return [self._held_out]

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return Adam."""
        return Adam(model.parameters(), lr=self.settings["peak_rate"], fused=True)

    def num_items(self, batch: Batch) -> int:
        """Return the images."""
        return len(batch[0])
