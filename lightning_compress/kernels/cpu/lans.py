"""LANS on one tensor: two passes over memory, of which ``torch._foreach_*`` needs fourteen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lightning_compress.kernels.cpu.compiling import njit

_BLOCK = 4096
"""Elements whose squares are summed in the tensor's own type, in any order; their sums are added in float64."""


class Coefficients(NamedTuple):
    """Numbers of one step, all of the tensor's type.

    With g' = gradient * g + joined * x, m = beta1 m + beta3 g' and v = beta2 v + rest2 g'^2, the directions are
    u = first m / (sqrt(v) + eps) + decay x and w = root g' / (sqrt(v) + eps) + decay x.
    """

    gradient: float
    joined: float
    beta1: float
    beta3: float
    beta2: float
    rest2: float
    first: float
    root: float
    eps: float
    decay: float


_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
"""What lets loops with sums and divisions become vector code."""


@njit()
def accumulate(x, g, m, v, c):
    """Moves m and v in place; returns the squared norms of x, u and w."""
    sum_x, sum_u, sum_w = 0.0, 0.0, 0.0
    for begin in range(0, len(x), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        of_x, of_u, of_w = _accumulate_block(x[block], g[block], m[block], v[block], c)
        sum_x += of_x
        sum_u += of_u
        sum_w += of_w
    return sum_x, sum_u, sum_w


@njit(**_OPTIONS)
def _accumulate_block(x, g, m, v, c):
    one = x.dtype.type(1)  # a plain 1 would make everything float64
    of_x = of_u = of_w = x.dtype.type(0)
    for i in range(len(x)):
        gradient = c.gradient * g[i] + c.joined * x[i]
        m[i] = c.beta1 * m[i] + c.beta3 * gradient
        v[i] = c.beta2 * v[i] + c.rest2 * gradient * gradient
        scale = one / (np.sqrt(v[i]) + c.eps)
        u = c.first * m[i] * scale + c.decay * x[i]
        w = c.root * gradient * scale + c.decay * x[i]
        of_x += x[i] * x[i]
        of_u += u * u
        of_w += w * w
    return of_x, of_u, of_w


@njit(**_OPTIONS)
def move(x, g, m, v, c, rate_u, rate_w):
    """Adds rate_u u + rate_w w to x, both made from the old x."""
    one = x.dtype.type(1)
    for i in range(len(x)):
        gradient = c.gradient * g[i] + c.joined * x[i]
        scale = one / (np.sqrt(v[i]) + c.eps)
        u = c.first * m[i] * scale + c.decay * x[i]
        w = c.root * gradient * scale + c.decay * x[i]
        x[i] += rate_u * u + rate_w * w
