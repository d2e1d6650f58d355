"""The training loop: data, loss, optimizer, schedule, step. The user's `for` is where callbacks would be."""
