"""Slots on a GPU: Triton kernels, chosen by bucket of M, in captured CUDA graphs. Needs torch and triton, not vLLM."""
