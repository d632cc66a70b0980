"""An agent program that calls the model twice, and tasks for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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
