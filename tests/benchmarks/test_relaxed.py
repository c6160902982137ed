"""benchmarks/convergence/relaxed.py scales what arrives, and error feedback knows of it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.convergence.relaxed import Relaxed
from lightning_compress import CenteredTopK, Compressor, TopK
from lightning_compress.testing import SimulatedExchange


def sent(compressor: Compressor, steps: int, exchange: str = "all_gather") -> torch.Tensor:
    """The sum of what arrives of one gradient in so many steps, [32, 64]."""
    model = torch.nn.Linear(64, 32, bias=False)
    gradient = {"weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(0))}
    simulated = SimulatedExchange(model, 2, compressor, exchange=exchange)  # type: ignore[arg-type]
    return torch.stack([simulated.mean([gradient, gradient])["weight"] for _ in range(steps)]).sum(0)


@pytest.mark.parametrize("inner", [TopK(0.05), CenteredTopK(0.1)], ids=str)
def test_a_factor_scales_what_arrives_and_the_residual_makes_up_for_it(inner: Compressor) -> None:
    gradient = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sent(Relaxed(inner, 1.0), 3, "two_way"), sent(inner, 3, "two_way"))
    assert torch.allclose(sent(Relaxed(inner, 0.75), 1), 0.75 * sent(inner, 1))
    assert torch.allclose(sent(Relaxed(inner, 0.75), 300) / 300, gradient, atol=0.15)
