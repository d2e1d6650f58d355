"""Models of a run: the reference decoder, transformers models, and any `nn.Module` of the user's."""
