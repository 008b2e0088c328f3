"""Folds and later anchors, which make a long chain short to read."""
