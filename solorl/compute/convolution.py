"""Convolutions in JAX that are fast on every device."""

import jax
import jax.numpy as jnp


def conv2d(x: jax.Array, weight: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution without padding: x (batch, height, width, fan_in), weight (k, k, fan_in, fan_out) -> (batch,
    new_height, new_width, fan_out).

    On the CPU it is computed as a product of matrices where `stride` divides the sides of image and kernel, because
    XLA's own convolution is many times slower inside a compiled loop; elsewhere it is `jax.lax.conv`. Both differ by
    rounding only.
    """
    device = jax.config.jax_default_device or jax.devices()[0]  # type: ignore[attr-defined]
    on_cpu = getattr(device, "platform", device) == "cpu"  # JAX_DEFAULT_DEVICE makes it a name
    if on_cpu and not any(size % stride for size in (*x.shape[1:3], *weight.shape[:2])):
        return _product(x, weight, stride)
    names = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), "VALID", dimension_numbers=names)


def _product(x: jax.Array, weight: jax.Array, stride: int) -> jax.Array:
    """`conv2d` as a product of matrices."""
    batch, height, width, fan_in = x.shape
    rows, columns, k, fan_out = height // stride, width // stride, weight.shape[0] // stride, weight.shape[3]
    # a block of stride x stride pixels becomes one pixel: then the stride is 1 and the kernel k x k
    x = x.reshape(batch, rows, stride, columns, stride, fan_in).swapaxes(2, 3).reshape(batch, rows, columns, -1)
    weight = weight.reshape(k, stride, k, stride, fan_in, fan_out).swapaxes(1, 2)
    weight = weight.reshape(k * k, x.shape[3], fan_out)
    offsets, new_rows, new_columns = [(i, j) for i in range(k) for j in range(k)], rows - k + 1, columns - k + 1
    if k > 2:  # the k x k pixels under the kernel side by side, then one product (im2col)
        x = jnp.concatenate([x[:, i : i + new_rows, j : j + new_columns] for i, j in offsets], 3)
        return x @ weight.reshape(-1, fan_out)
    # few offsets: each pixel times each offset of the kernel, then shifted and added
    parts = (x @ weight.swapaxes(0, 1).reshape(x.shape[3], -1)).reshape(batch, rows, columns, k * k, fan_out)
    shifted = (parts[:, i : i + new_rows, j : j + new_columns, n] for n, (i, j) in enumerate(offsets))
    return sum(shifted, jnp.zeros(()))
