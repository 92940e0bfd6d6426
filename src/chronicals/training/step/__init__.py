"""One training step: forward, backward, optimizer step, accumulation, CUDA graphs, and its metrics."""
