"""Quantised checkpoints, made at publish: which weights become what, by the arithmetic of the field's own tools."""

from deltackpt.quantize.recipe import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe"]
