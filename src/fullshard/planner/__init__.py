"""Plans: describes the model, finds the hardware, predicts memory and seconds, and searches."""
