"""Removal of what no kept step and no lease needs: planned, shown, executed."""
