"""What a checkpoint is quantised to: a format by name, and the modules that it leaves alone.

The formats are those that engines load: the block format of DeepSeek, as transformers writes it, and those of
compressed-tensors, by its own code.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deltackpt.errors import UsageError
from deltackpt.util.extras import install_line

IGNORE = ("lm_head", "re:.*embed.*", r"re:.*\bwte$", r"re:.*\bwpe$", "re:.*gate$", "re:.*router.*")
TIED = frozenset({"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared", "lm_head"})

# By name: how compressed-tensors calls its format, what its scheme says of weights and of activations, where those are
# quantised, too. Activations are quantised as they come ("dynamic"): a publisher has no data to calibrate with.
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
_SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "fp8-channel": ("float-quantized", {**_FLOAT8, "strategy": "channel"}, {**_FLOAT8, "strategy": "token"}),
    "fp8-tensor": ("float-quantized", {**_FLOAT8, "strategy": "tensor"}, {**_FLOAT8, "strategy": "token"}),
    "int8-channel": ("int-quantized", {**_INT8, "strategy": "channel"}, {**_INT8, "strategy": "token"}),
    "int4-group": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        None,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**_FLOAT4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        None,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {**_FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        None,
    ),
}
RECIPES = ("fp8-block", *_SCHEMES)
_TOGETHER = {"int4-group": 8, "nvfp4": 2, "mxfp4": 2}
BLOCK = 128  # rows and columns of a block of "fp8-block"


@dataclass(frozen=True)
class Recipe:
    """One of `RECIPES`, and the modules that keep their weights.

        TrainerHook(model, "runs/repo", ref="fp8", quantize=Recipe("fp8-block"))

    ``name``    "fp8-block" (E4M3 in blocks of 128 x 128 with `weight_scale_inv`, as DeepSeek and transformers have it),
                "fp8-channel", "fp8-tensor", "int8-channel", "int4-group" (groups of 128), "nvfp4", "mxfp4"
    ``ignore``  names of modules, or "re:" and a pattern that a name matches from its beginning; by default the head,
                embeddings and the routers of experts, which engines do not quantise either

    Weights are the two-dimensional tensors called `….weight`, of floating point. Raises UsageError
    ``quantize-option``.
    """

    name: str
    ignore: tuple[str, ...] = IGNORE

    def __post_init__(self) -> None:
        if self.name not in RECIPES:
            raise _refusal("a recipe", self.name, f"one of {', '.join(RECIPES)}")
        if isinstance(self.ignore, str) or not all(isinstance(text, str) for text in self.ignore):
            raise _refusal("ignore", self.ignore, "names of modules, or patterns that begin with re:")
        object.__setattr__(self, "ignore", tuple(self.ignore))
        for text in self.ignore:
            if text.startswith("re:"):
                try:
                    re.compile(text[3:])
                except re.error as error:
                    raise _refusal("ignore", text, f"a pattern ({error})") from error

    @classmethod
    def of(cls, value: object) -> Recipe | None:
        """A recipe, or the name of one; None stays None. Raises UsageError ``quantize-option``."""
        if value is None or isinstance(value, Recipe):
            return value
        if isinstance(value, str):
            return cls(value)
        raise _refusal("a recipe", value, f"a Recipe, or one of {', '.join(RECIPES)}")

    @property
    def compressed_format(self) -> str | None:
        """What compressed-tensors calls the form of the files; None where it is not its own."""
        return _SCHEMES[self.name][0] if self.name in _SCHEMES else None

    @cached_property
    def scheme(self) -> Any:
        """The `QuantizationScheme` of compressed-tensors. Raises UsageError ``quantize-missing`` without it."""
        quantization = library()
        _, weights, activations = _SCHEMES[self.name]
        return quantization.QuantizationScheme(
            targets=["Linear"],
            weights=quantization.QuantizationArgs(**weights),
            input_activations=activations and quantization.QuantizationArgs(**activations, dynamic=True),
        )

    @property
    def cell(self) -> tuple[int | None, int | None]:
        """Rows and columns of the weight that share a scale; None for all of them."""
        if self.name == "fp8-block":
            return BLOCK, BLOCK
        weights = _SCHEMES[self.name][1]
        return (None, None) if weights["strategy"] == "tensor" else (1, weights.get("group_size"))

    @property
    def group(self) -> int | None:
        """Columns that have to divide those of every weight; None where any number will do."""
        return None if self.name == "fp8-block" else self.cell[1]

    @property
    def together(self) -> int:
        """Columns that a word or byte of the packed values holds."""
        return _TOGETHER.get(self.name, 1)

    def ignores(self, module: str) -> bool:
        """Does a module keep its weight?"""
        return any(_names(text, module) for text in self.ignore)

    def refuse_nothing(self, weights: int) -> None:
        """Raise UsageError ``quantize-option``: of so many weights, none is to be quantised."""
        raise _refusal("ignore", f"{weights} weights that are all left alone", "one at least that is quantised")

    def naming(self, modules: Collection[str]) -> list[bool]:
        """Of each entry of ``ignore``: does it name one of the modules? What is there by default may name none."""
        return [text in IGNORE or any(_names(text, module) for module in modules) for text in self.ignore]

    def refuse_unnamed(self, naming: Iterable[bool]) -> None:
        """Raise UsageError ``quantize-option`` for an entry that names nothing: what it was to keep is quantised."""
        if odd := [text for text, names in zip(self.ignore, naming, strict=True) if not names]:
            hint = "A name is that of a layer, whole; re:PATTERN matches from its beginning, re:vision all of `vision`."
            need = "names and patterns of modules that there are"
            raise _refusal("ignore", ", ".join(odd), need, hint)

    def refuse_tied(self, modules: Iterable[str]) -> None:
        """Raise UsageError ``quantize-option`` for an embedding among modules that are to be quantised, where it is the
        head as well: engines load their head from its values, and no scale."""
        if odd := sorted(module for module in modules if module.rpartition(".")[2] in TIED):
            need = "embeddings that keep their weights where they are the head as well (tie_word_embeddings)"
            raise _refusal("ignore", f"nothing of {', '.join(odd)}", need, f"ignore=(*IGNORE, {odd[0]!r})")

    def config(self, kept: Iterable[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json; ``kept`` names the modules whose weights are not quantised."""
        if self.name == "fp8-block":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
                "modules_to_not_convert": sorted(kept),
            }
        config = library().QuantizationConfig(
            config_groups={"group_0": self.scheme},
            format=self.compressed_format,
            quantization_status="compressed",
            ignore=sorted(kept),
        )
        found: dict[str, Any] = config.model_dump(mode="json")
        return found


def _names(text: str, module: str) -> bool:
    return re.match(text[3:], module) is not None if text.startswith("re:") else text == module


def library() -> Any:
    """`compressed_tensors.quantization`. Raises UsageError ``quantize-missing`` where it is not installed."""
    try:
        import compressed_tensors.quantization as found
    except ImportError as error:
        raise UsageError(
            "quantize-missing",
            where="quantize",
            have=f"no compressed-tensors ({error})",
            need="the library that defines the format",
            hint=install_line("quantize"),
        ) from error
    return found


def _refusal(what: str, have: object, need: str, hint: str = "") -> UsageError:
    shown = have if what == "ignore" and isinstance(have, str) else repr(have)
    return UsageError("quantize-option", where=f"quantize, {what}", have=shown[:200], need=need, hint=hint)
