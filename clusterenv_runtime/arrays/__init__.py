"""Trees of arrays, for example batches of Gymnasium's spaces, and stacks of frames."""
