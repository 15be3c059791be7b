"""Trees of arrays, such as batches of Gymnasium's spaces, and stacks of frames."""
