"""Training data: tokens in an order that depends only on the seed and the step."""
