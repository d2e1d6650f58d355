"""Models of a run: the reference decoder, transformers models, and
any `nn.Module` from the user's function.
"""
