"""The training loop: data, loss, optimizer, schedule, step. The body of the loop belongs to the user."""
