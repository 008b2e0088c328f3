"""The encoding `packed`: positions as Rice-coded gaps, values as ULP steps (FORMAT section "Packed")."""
