"""The training loop: data, loss, optimizer, schedule, step.

The user's own `for` loop takes the place of callbacks.
"""
