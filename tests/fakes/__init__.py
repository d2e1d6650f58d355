"""Small models and data that go through the real seams."""
