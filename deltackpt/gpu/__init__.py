"""Diff, encode and digest where the weights are, on a card. Torch is needed here, and Triton where a kernel runs."""
