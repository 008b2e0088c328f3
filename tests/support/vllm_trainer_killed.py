"""A trainer with vLLM's interface, in a process of its own, that dies or stands still inside of `send_weights`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from support.engine_steps import nudge
from support.fake_vllm import installed
from support.fake_vllm_ranks import NEWEST, TABLE, VLLM, first_state
from support.fake_vllm_trainer import Client, FullSource


class Ending(Client):
    """``how``: the signal for this process before a call of the second step is made."""

    def __init__(self, url: str, call: str, how: int) -> None:
        super().__init__(url)
        self.call, self.how = call, how

    def _post(self, path: str, body: Any = None) -> None:
        if path == self.call and self.calls.count(path) == 1:
            os.kill(os.getpid(), self.how)
        super()._post(path, body)


def trainer(url: str, server: str, call: str, how: int, out: str) -> None:
    held = {name: tensor.clone() for name, tensor in first_state().items()}
    with installed(NEWEST, TABLE[NEWEST]):
        module = importlib.import_module(f"{VLLM}.trainer")
        info = module.DeltaTrainerInit(url, rank=0, hook={"threads": 1})
        engine = module.DeltaTrainer.trainer_init(info, client=Ending(server, call, how), source=FullSource(held))
        for step in (1, 2):
            for name, tensor in nudge(held, step, 0.2).items():
                held[name].copy_(tensor)
            engine.send_weights()
            Path(out).with_suffix(f".{step}").write_text("")
        engine.shutdown()
