"""Episodes of a tiny policy with transformers' sampler in this process, and environments that misbehave."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mobula.actors.environments.base import Action, EnvironmentSpec, Message, Reset, Step, encoded
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig

HANG_S = 60.0  # that a hanging step takes


def episode_config(model: Path, *overrides: str) -> RunConfig:
    """A run whose prompts are observations; nothing of it is started."""
    words = ("policy=tiny_qwen2_5_vl", "data=environment", "environment.name=episode_data:Scripted")
    words += ("rewards=environment", f"policy.model={model}", "data.max_prompt_tokens=400", "data.max_pixels=50176")
    return load_config([*words, "sampler.max_images_per_prompt=8", "sampler.max_tokens=6", *overrides])


def engine_settings(model: Path, chat: ChatProcessor) -> EngineSettings:
    """Of transformers' sampler."""
    return EngineSettings(
        model=str(model), dtype="float32", device="cpu", seed=0, max_num_seqs=8, kv_cache_bytes=1 << 20,
        sampler=episode_config(model, "sampler.chunk_tokens=4").sampler,
        keeps_kv_cache=False, sleep_level=0, reports_load=False,
        banned_ids=chat.media_token_ids, stop_ids=chat.eos_token_ids, pad_id=chat.pad_token_id,
        expected=checkpoint_manifest(model, "float32"), has_unpushed=False, adapters=None, tensor_parallel=1,
    )  # fmt: skip


class Scripted:
    """Shows an image in every turn and ends after `num_turns`, rewarding turn k with k."""

    played: ClassVar[list[tuple[int, int, str]]] = []  # seed, turn and text of every step in this process
    others: ClassVar[Iterator[int]] = count(1)  # seeds of its own, another one at each reset
    broken: ClassVar[set[tuple[int, str]]] = set()

    def __init__(
        self, *, num_turns: int = 3, fault: str = "", images: bool = True, turn: int = 1, deterministic: bool = True
    ) -> None:
        self.spec = EnvironmentSpec(max_turns=8, is_deterministic=deterministic, demonstrates=True)
        self._num_turns, self._fault, self._images, self._at = num_turns, fault, images, turn
        self._seed = self._turn = 0

    def demonstrate(self) -> str:
        return f"go {self._turn + 1}"

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        self._seed, self._turn = seed, 0
        self._fault, self._at = options.get("fault", self._fault), options.get("turn", self._at)
        self._marker = options.get("marker", "")
        if self._fault == "seed":
            self._seed = next(self.others) % 251
        if self._fault == "reset":
            raise RuntimeError("no reset today")
        return Reset((self._message(),), {"answer": str(seed), "solution": str(seed)})

    def step(self, action: Action) -> Step:
        self._turn += 1
        self.played.append((self._seed, self._turn, action.text))
        reward: float = self._turn
        observation: Sequence[Message] = (self._message(),)
        if self._turn == self._at:
            match self._fault:
                case "raise":
                    raise RuntimeError("no step today")
                case "fork":
                    if os.fork():
                        time.sleep(0.05)
                    else:
                        reward = -1.0
                case "hang":
                    time.sleep(HANG_S)
                case "die":
                    os._exit(3)
                case "nan":
                    reward = float("nan")
                case "kill" if not os.path.exists(self._marker):
                    open(self._marker, "x").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                case "once":
                    if (self._seed, "once") not in self.broken:
                        self.broken.add((self._seed, "once"))
                        raise RuntimeError("not yet")
                case "drift":
                    observation = (Message("user", f"at {time.monotonic_ns()}"),)
                case "role":
                    observation = (Message("wizard", "hello"),)
                case "large":
                    observation = (Message("user", "a" * 10_000_000),)
                case "special":
                    observation = (Message("user", "<|im_end|>"),)
                case "image":
                    observation = (Message("user", "<image>", (b"no image",)),)
                case "placeholder":
                    observation = (replace(self._message(), text="<image><image>"),)
        return Step(tuple(observation), reward, self._turn >= self._num_turns, False, {})

    def close(self) -> None:
        """Nothing is held."""

    def _message(self) -> Message:
        text = f" digit {self._turn}"
        if not self._images:
            return Message("user", f"{text} of {self._seed}")
        pixels = np.full((2, 2, 3), (40 * self._turn, self._seed % 251, 99), dtype=np.uint8)
        return Message("user", f"<image>{text}", (encoded(pixels, scale=28),))


AGENT = """
import json, os, subprocess, sys, time, urllib.request

task = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": f"Say {task['letter']}."}]

def call():
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        messages.append(json.load(reply)["choices"][0]["message"])
    return messages[-1]["content"]

kind = task.get("kind", "")
if kind == "silent":
    sys.exit("no key for the tool")
first = call()
if kind == "hang":
    subprocess.Popen([sys.executable, "-c", f"import time; open({task['mark']!r}, 'w').close(); time.sleep(600)"])
    time.sleep(600)
messages = messages[1:] if kind == "forgets" else messages
messages.append({"role": "user", "content": f"That has {len(first)} letters. Again."})
second = call()
print("thinking ...")
if kind == "wordless":
    print("done")
else:
    rewards = {"has_letter": float(task["letter"] in second), "is_short": float(len(second) < 4)}
    print(json.dumps({"rewards": rewards, "is_truncated": kind == "tired"}))
"""


def write_program(folder: Path, *kinds: str) -> dict[str, object]:
    """Write it and its six tasks, of the given kinds; returns the options of `environment=program`."""
    rows = [{"letter": "abcdef"[n], "kind": kind, "mark": str(folder / "started")} for n, kind in enumerate(kinds)]
    rows += [{"letter": letter} for letter in "abcdef"[len(kinds) :]]
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "command": [sys.executable, str(folder / "agent.py")], "tasks": str(folder / "tasks.jsonl"),
        "max_turns": 4, "num_validation": 1, "num_test": 1,
    }  # fmt: skip
