"""How far a product may lie from float64: one table, and the bound it enters.

Weights are exact, and the reference rounds activations just as the contract says, so a kernel adds
float32 rounding alone. One term x * w of a sum of K terms meets

* one rounding of its own, the product; with scales ``SCALED`` in all: also weight times scale or
  group sum times scale, and the group sum joining the total;
* at most K roundings of partial sums, each relative to a partial sum that is no larger than
  S = sum |x| |w|.

Each is at most u = 2^-24 relative. The worst case is (SCALED + K) u S; roundings of independent
data behave like a random walk (Higham and Mary, 2019), so (SCALED + SIGMAS sqrt(K)) u S is
passed with a probability that never shows, and is tight enough to see one wrong bit of a scale.
Terms below float32's normal range may be flushed: K times the smallest normal number is added.

The cosine distance 1 - cos(y, reference) grows with the square of the relative error of y as a
vector; rounding as above gives about (u sqrt(K))^2 < 1e-10, while a lost column or a wrong
scale gives far more.
"""

from __future__ import annotations

import numpy as np

UNIT = 2.0**-24
SMALLEST_NORMAL = 2.0**-126
SIGMAS = 4.0
SCALED = 3.0
COSINE_DISTANCE = 1e-10

# Relative error of the vector kernels' exp (vector_ops.inl), and of what is built from it.
EXP_RELATIVE = 3e-7
VECTOR_RELATIVE = 1e-6


def product_bound(format: str, num_terms: int, magnitude: np.ndarray) -> np.ndarray:
    """Largest |y - reference| for each element, whose magnitude is S = sum |x| |w|."""
    own = 1.0 if format in ("f32", "f16", "bf16") else SCALED
    roundings = own + SIGMAS * np.sqrt(num_terms)
    return roundings * UNIT * magnitude + num_terms * SMALLEST_NORMAL
