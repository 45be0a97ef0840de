"""conv2d against its definition, as a product of matrices (on the CPU) and as XLA's own convolution (elsewhere)."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from solorl import conv2d  # noqa: E402
from solorl.compute import convolution  # noqa: E402

# (height, width), k, stride; in the last two the stride does not divide
CASES = [((12, 16), 8, 4), ((8, 8), 4, 2), ((6, 5), 3, 1), ((9, 9), 3, 3), ((10, 10), 5, 2), ((9, 8), 4, 2)]


def arrays(sides, k):
    rng = np.random.default_rng(0)
    return (np.float32(rng.normal(size=shape)) for shape in ((2, *sides, 3), (k, k, 3, 5)))


@pytest.mark.parametrize(("sides", "k", "stride"), CASES)
def test_a_convolution_is_a_product_with_each_patch(sides, k, stride):
    x, weight = arrays(sides, k)
    got = conv2d(x, weight, stride)
    assert got.shape == (2, *((side - k) // stride + 1 for side in sides), 5)
    for i, j in np.ndindex(got.shape[1:3]):
        patch = x[:, i * stride : i * stride + k, j * stride : j * stride + k]
        np.testing.assert_allclose(got[:, i, j], np.tensordot(patch, weight, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("sides", "k", "stride"), CASES[:4])
def test_the_product_has_the_gradients_of_the_convolution(sides, k, stride):
    x, weight = arrays(sides, k)
    names = ("NHWC", "HWIO", "NHWC")

    def lax_conv(x, weight):
        return jax.lax.conv_general_dilated(x, weight, (stride, stride), "VALID", dimension_numbers=names)

    def product(x, weight):
        return convolution._product(x, weight, stride)

    both = (jax.grad(lambda *inputs, f=f: (f(*inputs) ** 2).sum(), (0, 1))(x, weight) for f in (product, lax_conv))
    for got, expected in zip(*both, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)
