"""What the help of each command shows at its end: calls to copy, which a test parses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

EXAMPLES: Final[dict[str, Sequence[str]]] = {
    "": (
        "deltackpt write step_12 s3://bucket/run-42",
        "deltackpt log s3://bucket/run-42",
        "deltackpt apply s3://bucket/run-42 restored --step 12",
    ),
    "write": (
        "deltackpt write step_12 runs/repo",
        "deltackpt write step_12 s3://bucket/run-42 --base step_11",
        "deltackpt write step_12 s3://bucket/run-42 --ref fp8 --quantize fp8-block",
    ),
    "apply": (
        "deltackpt apply runs/repo restored --step 12",
        "deltackpt apply s3://bucket/run-42 /var/cache/run-42 --cache",
        "deltackpt apply s3://bucket/run-42 layer.safetensors --step 12 --tensor 'model.layers.7.*'",
    ),
    "verify": (
        "deltackpt verify s3://bucket/run-42",
        "deltackpt verify restored --against runs/repo --step 12",
    ),
    "log": ("deltackpt log runs/repo", "deltackpt log runs/repo --graph"),
    "inspect": ("deltackpt inspect runs/repo --step 12", "deltackpt inspect runs/repo --sort changes --top 20"),
    "diff": ("deltackpt diff step_11 step_12",),
    "refs": ("deltackpt refs s3://bucket/run-42",),
    "tag": ("deltackpt tag runs/repo best 12", "deltackpt tag runs/repo"),
    "gc": (
        "deltackpt gc s3://bucket/run-42 --keep-last 100 --keep-every 50 --dry-run",
        "deltackpt gc s3://bucket/run-42 --keep-last 100 --keep-every 50",
    ),
    "compact": ("deltackpt compact runs/repo --levels", "deltackpt compact s3://bucket/run-42 --packs"),
    "status": (
        "deltackpt status s3://bucket/run-42 --cache /var/cache/run-42",
        "deltackpt status s3://bucket/run-42 --watch --metrics http://127.0.0.1:9400/metrics",
    ),
    "report": (
        "deltackpt report s3://bucket/run-42 -o run-42.html",
        "deltackpt report runs/repo --text --since 7d",
    ),
    "doctor": ("deltackpt doctor s3://bucket/run-42",),
    "keygen": ("deltackpt keygen trainer.key --comment trainer",),
    "sign": ("deltackpt sign runs/repo --sign trainer.key", "deltackpt sign runs/repo 12 best --sign trainer.key"),
    "keys": ("deltackpt keys runs/repo --set next.keys --sign old.key --sign new.key", "deltackpt keys runs/repo"),
    "mirror": (
        "deltackpt mirror s3://bucket/run-42 /backup/run-42 --limit 100MB/s",
        "deltackpt mirror /backup/run-42 s3://bucket/run-42 --repair",
    ),
    "push": ("deltackpt push runs/repo s3://bucket/run-42",),
    "pull": ("deltackpt pull runs/repo s3://bucket/run-42",),
    "follow": (
        "deltackpt follow s3://bucket/run-42 /var/cache/run-42 --exec 'echo step $DELTACKPT_STEP at $DELTACKPT_PATH'",
    ),
    "serve-updates": (
        "deltackpt serve-updates s3://bucket/run-42 /var/cache/run-42 --engine vllm=http://127.0.0.1:8000",
    ),
    "serve-adapters": (
        "deltackpt serve-adapters s3://bucket/lora /var/adapters --engine vllm=http://127.0.0.1:8000 --adapter math",
    ),
    "watch": ("deltackpt watch runs/42 s3://bucket/run-42 --pattern 'checkpoint-{step}'",),
    "import": ("deltackpt import auto old_run runs/repo --base initial_checkpoint",),
    "export": ("deltackpt export runs/repo slime out --from 12 --to 40",),
    "convert": ("deltackpt convert slime old_run trl out --base initial_checkpoint",),
}


def shown(lines: Sequence[str]) -> str:
    """The end of a help text, whose lines are not filled."""
    return "\n".join(["\b", f"Example{'s' * (len(lines) > 1)}:", *(f"  {line}" for line in lines)])
