"""Weights in other formats: read from and written to safetensors, Hugging Face and PEFT directories."""
