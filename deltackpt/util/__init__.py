"""Helpers that know nothing of weights: threads, progress, files on a disk, mappings."""
