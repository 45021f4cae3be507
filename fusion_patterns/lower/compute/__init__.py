"""What packed kernels compute, as TE computes on packed tensors; how is said in :mod:`..schedule`."""
