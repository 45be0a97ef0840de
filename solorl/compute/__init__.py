"""What computes: device, seeds, threads, fast forward passes and gradient steps, ranks, other processes."""
