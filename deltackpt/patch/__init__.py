"""Patches: what a part holds, read from memory or by ranges, and written."""
