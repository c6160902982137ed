"""The density of a sparse compressor over the course of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_compress.checks import is_number, is_whole


@dataclass(frozen=True)
class DensityWarmup:
    """Deep Gradient Compression's warm-up, from a gentle density to the compressor's own (Lin et al. 2017, section 3.4).

    Every stage lasts ``epochs`` epochs or ``steps`` exchanges (one per optimizer step, see ``GradientExchange``). After the
    last stage the compressor's own ratio holds. A stage whose sparse exchange would send more than a dense one is exchanged
    dense.

    Args:
        densities: Share of elements to keep in each stage, not rising; the paper's by default. 1.0 is a dense stage:
            the most effective way to lose less accuracy on short runs.
        epochs: Epochs per stage; fractions are allowed. The default when ``steps`` is not given: one.
        steps: Optimizer steps per stage, instead of ``epochs``. Plain DDP, which knows no epochs, needs it, or
            ``register_comm_hook(steps_per_epoch=...)``.
    """

    densities: Sequence[float] = (0.25, 0.0625, 0.015625, 0.004)
    epochs: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.densities, Sequence):
            raise ValueError(f"densities is a list of numbers, got {self.densities!r}")
        object.__setattr__(self, "densities", tuple(self.densities))
        if not self.densities or any(not is_number(d) or not 0.0 < d <= 1.0 for d in self.densities):
            raise ValueError(f"densities must be one or more numbers in (0, 1], got {self.densities!r}")
        if any(later > earlier for earlier, later in zip(self.densities, self.densities[1:], strict=False)):
            raise ValueError(f"densities must not rise, got {self.densities!r}")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if self.epochs is not None and not (is_number(self.epochs) and self.epochs > 0):
            raise ValueError(f"epochs per stage must be a positive number, got {self.epochs!r}")
        if self.steps is not None and (not is_whole(self.steps) or self.steps < 1):
            raise ValueError(f"steps per stage must be a whole number, 1 or more, got {self.steps!r}")

    def stage_steps(self, steps_per_epoch: int | None) -> int:
        """Optimizer steps of one stage.

        Raises:
            ValueError: The stages are given in epochs and nobody knows how long an epoch is.
        """
        if self.steps is not None:
            return self.steps
        if steps_per_epoch is None:
            raise ValueError(
                "DensityWarmup counts epochs, whose length plain DDP does not know: give DensityWarmup(steps=...), or "
                "register_comm_hook(..., steps_per_epoch=...)."
            )
        return max(1, round((self.epochs or 1.0) * steps_per_epoch))

    def density(self, step: int, steps_per_epoch: int | None, final: float) -> float:
        """The density at an optimizer step; never below ``final``, the compressor's own."""
        stage = step // self.stage_steps(steps_per_epoch)
        return max(final, self.densities[stage]) if stage < len(self.densities) else final
