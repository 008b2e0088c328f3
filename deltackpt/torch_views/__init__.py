"""Weights of torch as named, boxed views: what trainers and engines share. Torch is needed here."""
