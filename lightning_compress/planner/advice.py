"""Which method to take: the mildest one that is as fast as any, within the noise."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_compress.planner.methods import DDP, HIERARCHICAL, mildness, needs_own_optimizer
from lightning_compress.planner.predict import Prediction
from lightning_compress.planner.sample import NOISE

_BOUND = 0.1
"""Share of a step up to which communication counts as hidden."""


def recommend(predictions: Sequence[Prediction]) -> Prediction:
    """The mildest method whose step is as short as the shortest, within noise: accuracy first.

    Noise is half of the shortest step's interval, and 3 % at least. Methods that need an optimizer of their own are not
    recommended.

    Args:
        predictions: Of all methods that may be taken.
    """
    limit = as_fast_as_any(predictions)
    candidates = [p for p in predictions if not needs_own_optimizer(p.method) and p.seconds <= limit]
    return min(candidates, key=lambda p: (mildness(p.method), p.seconds))


def as_fast_as_any(predictions: Sequence[Prediction]) -> float:
    """Seconds up to which a step is as short as the shortest, within noise."""
    best = min((p for p in predictions if not needs_own_optimizer(p.method)), key=lambda p: p.seconds)
    return best.seconds + noise(best)


def noise(prediction: Prediction) -> float:
    """Seconds by which two steps may differ without meaning anything."""
    return max(NOISE * prediction.seconds, (prediction.high - prediction.low) / 2)


def explain(chosen: Prediction, predictions: Sequence[Prediction]) -> str:
    """One sentence: what to take, and why."""
    others = {p.method: p for p in predictions}
    gains = " and ".join(
        f"{others[name].seconds / chosen.seconds:.2f}x over {name} DDP ({1e3 * others[name].seconds:.0f} ms)"
        for name in DDP
        if name in others and name != chosen.method
    )
    step = f"predicted step {1e3 * chosen.seconds:.0f} ms" + (f", {gains}" if gains else "")
    if chosen.method not in DDP:
        bare = chosen.method.removeprefix(HIERARCHICAL)
        layered = f'CompressedStrategy("{bare}", exchange="hierarchical")'
        strategy = f'strategy="compressed_{bare}"' if bare == chosen.method else layered
        return (
            f"Use {strategy}: the link is the bottleneck and this is the mildest choice that is as fast as any; {step}."
        )
    if chosen.exposed <= _BOUND * chosen.seconds:
        why = "you are compute bound, communication hides behind backward"
    else:
        why = "compressing costs what it saves on this link"
    name = "ddp" if chosen.method == "fp32" else "compressed_bf16"
    return f'Use {chosen.method} DDP (strategy="{name}"): {why}; {step}.'
