"""Trees of arrays, Gymnasium's spaces as batches, and stacks of frames."""
