"""What no kept step and no lease reaches: planned, shown, removed."""
