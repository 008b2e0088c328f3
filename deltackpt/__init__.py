"""deltackpt: weights in motion, every training step as a tiny, bit-exact patch."""

__version__ = "0.1.0"
