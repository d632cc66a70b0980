"""`mobula score`: what it scores by, what it writes and prints, and what it refuses."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import make_prompt
from reward_data import AERORL, PUBLISHED, SIX_ROWS, record, write_jsonl
from rich.console import Console
from typer.testing import CliRunner, Result

from benchmarks.harness.corruption import PATTERNS, corrupt, pattern_of
from mobula.cluster.records.trajectory import Answers, Generated, Response, Reward
from mobula.cluster.rollout.evaluation import ScoredPrompt
from mobula.cluster.rollout.response_logs import ResponseFiles
from mobula.configs.load import dump_config, load_config
from mobula.deploy.cli import app
from mobula.deploy.data import score as scoring
from mobula.deploy.data.options import ScoreCommand
from mobula.rewards.offline import scorer

HEAVY = ("torch", "ray", "vllm", "transformers", "deepspeed", "pyarrow", "jinja2")
RECIPE = """
components:
  - name: accuracy
    function: exact_match
    weight: 1.0
    options: {ignore_case: true, whole_response: false}
  - name: shape
    function: format
    weight: 1.0
    options: {preset: boxed}
recipes:
  default:
    components: [accuracy, shape]
    weights: {}
    gates: [{component: shape, needs: accuracy, at_least: 1.0}]
    normalise: true
accuracy_component: accuracy
"""


def mobula(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def six(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "six.jsonl", SIX_ROWS)


def test_a_file_of_an_evaluation_is_scored_response_by_response(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "1+1?", "references": ["2"], "metadata": {}, "predictions": ["2", "3"],
         "generated_tokens": [9, 2], "is_truncated": [False, True], "correct": [True, False], "components": [{}, {}]},
        {"id": "b", "prompt": "?", "references": ["5"], "predictions": [], "correct": [None], "components": [None]},
        {"id": "c", "prompt": "2+2?", "references": ["4"], "predictions": ["4"], "correct": [True], "components": [{}]},
    ]  # fmt: skip
    source, results = write_jsonl(tmp_path / "held_out-0.jsonl", rows), tmp_path / "rows.jsonl"
    done = mobula("score", source, "rewards=exact_match", "--results", results, "--quiet")
    assert done.exit_code == 0 and "3 records: average 0.666667" in done.output, done.output
    scored = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["id"], row["reward"]) for row in scored] == [("a#0", 1.0), ("a#1", 0.0), ("c#0", 1.0)]


def test_what_an_evaluation_saves_is_scored_with_its_token_counts(tmp_path: Path) -> None:
    prompt = replace(make_prompt("test/0/a"), references=("4",), metadata={"label": "sums"})
    responses = (Response("4", 9, is_truncated=False), Response("5", 2, is_truncated=True))
    generated = Generated(None, None, Answers(prompt, (0, 1), responses))
    scored = ScoredPrompt(prompt, [Reward(1.0, {"right": 1.0}), None], generated)
    files = ResponseFiles(tmp_path, accuracy_component="right", correct_from=1.0, timeout_s=1)
    asyncio.run(files.write("held_out", 3, [scored, ScoredPrompt(prompt, [None])]))
    [row, excluded] = map(json.loads, (tmp_path / "held_out-3.jsonl").read_text().splitlines())
    assert (row["correct"], row["generated_tokens"], row["is_truncated"]) == ([True, None], [9, 2], [False, True])
    assert row["metadata"] == {"label": "sums"} and excluded["predictions"] == []
    results = tmp_path / "rows.jsonl"
    done = mobula("score", tmp_path / "held_out-3.jsonl", "rewards=exact_match", "--results", results, "--quiet")
    assert done.exit_code == 0 and "2 records: average 0.5" in done.output, done.output


@pytest.mark.parametrize("text", ["", '{"kind": "sample"}\n', '{"predictions": [], "references": ["1"]}\n'])
def test_nothing_that_was_scored_is_a_failure(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    done = mobula("score", tmp_path / "rows.jsonl", "rewards=exact_match", "--quiet")
    assert done.exit_code == 1 and "nothing was scored" in done.output, done.output


def test_a_rule_of_lengths_says_that_it_reads_words(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "components:\n  - {name: long, function: overlong, weight: 1.0, options: {max_tokens: 8, buffer_tokens: 6, "
        "penalty: 1.0}}\naccuracy_component: long\n"
    )
    counted, words = {"response": "a b c", "generated_tokens": 8}, {"response": "a b c"}
    source = write_jsonl(tmp_path / "rows.jsonl", [counted, words])
    done = mobula("score", source, "--recipe", recipe, "--quiet")
    assert "; 1 have no generated_tokens: long would read their number of words as their length" in done.output
    assert "average -0.583333" in done.output, "-1 for 8 tokens, -1/6 for 3 words"
    both = write_jsonl(tmp_path / "counted.jsonl", [counted])
    assert "generated_tokens" not in mobula("score", both, "--recipe", recipe, "--quiet").output
    assert "generated_tokens" not in mobula("score", source, "rewards=exact_match", "--quiet").output


def test_the_published_figures_from_the_command_line(six: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.json"
    done = mobula("score", six, *PUBLISHED, "--output", target, "--results", tmp_path / "rows.jsonl", "--quiet")
    assert done.exit_code == 0, done.output
    printed = "6 records: average 0.423333, pass rate 0.5; contains takes 0.833333 for right, 2 of them do not pass"
    assert done.output.strip() == printed
    *loud, last = mobula("score", six, *PUBLISHED).output.splitlines()
    assert json.loads("\n".join(loud))["average_reward"] == 0.423333 and last == printed, "without --quiet"
    report = json.loads(target.read_text())
    means = {"verifier": 0.333333, "grounding": 0.333333, "format": 0.7, "cost": 0.666667, "contains": 0.833333}
    assert report["component_averages"] == means
    assert [component["weight"] for component in report["rewards"]["components"]] == [0.45, 0.3, 0.2, 0.05, 0.0]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["row"], row["id"]) for row in rows] == [(n, row["id"]) for n, row in enumerate(SIX_ROWS, 1)]
    components = {"verifier": 0.5, "grounding": 1.0, "format": -0.8, "cost": 1.0, "contains": 1.0}
    assert rows[1] == {"row": 2, "id": "format-bad-contains", "reward": 0.415, "components": components}
    # diagnostics of the published report: format, grounding and verifier below 0, cost below 0.5
    low = {"format": 0.0, "grounding": 0.0, "verifier": 0.0, "cost": 0.5}
    assert [sum(row["components"][name] < mark for row in rows) for name, mark in low.items()] == [1, 2, 1, 1]


def test_the_results_are_the_same_from_several_processes(tmp_path: Path) -> None:
    rows = [corrupt(f"row-{i}", "what?", f"thing {i % 7}") for i in range(2500)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    for num in (1, 2):
        done = mobula("score", path, *AERORL, "--quiet", "--processes", num, "--results", tmp_path / f"{num}.jsonl")
        assert done.exit_code == 0, done.output
    found = (tmp_path / "1.jsonl").read_bytes()
    assert found == (tmp_path / "2.jsonl").read_bytes()
    assert [json.loads(line)["id"] for line in found.splitlines()] == [row["id"] for row in rows]


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "PROGRESS_PER_S", 1e3)
    path = write_jsonl(tmp_path / "rows.jsonl", [corrupt(f"row-{i}", "what?", f"thing {i % 7}") for i in range(2500)])
    printed = {}
    for is_terminal, is_quiet in ((True, False), (True, True), (False, False)):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        command = ScoreCommand(
            source=path, overrides=[*AERORL], max_ids=0, num_processes=2, timeout_s=60.0, is_quiet=is_quiet
        )
        scoring.score(command, console)
        printed[is_terminal, is_quiet] = console.file.getvalue()
    shares = [int(share) for share in re.findall(r"scoring rows.jsonl .*?(\d+)%", printed[True, False])]
    assert len(set(shares)) > 2 and shares == sorted(shares) and shares[-1] == 100
    assert "scoring" not in printed[True, True] + printed[False, False]


def test_a_recipe_scores_by_its_weights_and_gates(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rows = [
        record("both", r"\boxed{red}", "red"),
        record("plain", "red", "red"),
        record("wrong", r"\boxed{blue}", "red"),
        record("unknown", "red", None),
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    done = mobula("score", path, "--recipe", tmp_path / "recipe.yaml", "--quiet", "--output", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    # totals 1, 1/2 and 0, of the weights 1 and 1 normalised; the gate keeps the third one's format from counting
    assert report["average_reward"] == 0.5
    assert report["unscored"] == {"accuracy: failed": 1}
    assert "4 records: average 0.5," in done.output
    assert "; 1 have no score: accuracy: failed (1)" in done.output
    assert report["component_averages"] == {"accuracy": 0.666667, "shape": 0.5}
    assert [example["id"] for example in report["best"]] == ["both", "plain", "wrong"]


LABELS_RECIPE = """
recipes:
  default: {components: [accuracy], weights: {}, gates: [], normalise: false}
  shaped: {components: [accuracy, shape], weights: {accuracy: 0.75, shape: 0.25}, gates: [], normalise: false}
accuracy_component: accuracy
"""


def test_each_record_is_scored_by_the_recipe_of_its_label(tmp_path: Path) -> None:
    components, _ = RECIPE.split("recipes:")
    (tmp_path / "recipe.yaml").write_text(components + LABELS_RECIPE)
    rows = [record("a", r"\boxed{red}", "red"), record("b", "red", "red", label="shaped")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    done = mobula("score", path, "--recipe", tmp_path / "recipe.yaml", "--quiet", "--results", tmp_path / "r.jsonl")
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [(row["reward"], row["components"]) for row in found] == [
        (1.0, {"accuracy": 1.0}),
        (0.75, {"accuracy": 1.0, "shape": 0.0}),
    ]


def test_a_run_folder_is_scored_by_its_own_rewards_unless_others_are_named(tmp_path: Path) -> None:
    words = ["experiment=digits", "rewards=exact_match", "policy.model=none", "data.path=none"]
    (tmp_path / "config.yaml").write_text(dump_config(load_config(words)))
    columns = {"response_text": ["7", "it is 7"], "references": [["7"]] * 2}
    pq.write_table(pa.table(columns), tmp_path / "step-1.parquet")
    assert "2 records: average 0.5," in mobula("score", tmp_path, "--quiet").output
    whole = "rewards.components.0.options.whole_response=false"
    assert "2 records: average 1," in mobula("score", tmp_path, whole, "--quiet").output
    assert "contains takes 1 for right" in mobula("score", tmp_path, *AERORL, "--quiet").output


IMAGES_RECIPE = """
components:
  - {name: seen, function: FILE, weight: 1.0, needs_images: true}
accuracy_component: seen
processes: 2
"""
PLUGIN = """
import os, time

def score(request):
    if request.response.text == "hang":
        time.sleep(1000)
    if request.response.text.startswith("meet"):  # only two processes side by side can
        open(request.metadata["folder"] + "/" + request.response.text, "w").close()
        while len([name for name in os.listdir(request.metadata["folder"]) if name.startswith("meet")]) < 2:
            time.sleep(0.01)
    sizes = [len(image) for image in request.prompt_images]
    return sum(sizes) + 1000 * len(request.response.images)
"""


def test_a_recipe_sees_the_images_of_records_and_what_hangs_is_counted(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "recipe.yaml").write_text(IMAGES_RECIPE.replace("FILE", f'"{tmp_path}/plugin.py:score"'))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"12345")
    metadata = {"folder": str(tmp_path)}
    rows = [
        {"id": "path", "response": "x", "image": "images/a.png"},
        {"id": "two", "response": "x", "images": [str(tmp_path / "images/a.png"), "data:image/png;base64,QUJD"]},
        {"id": "drawn", "response": "x", "response_images": ["images/a.png"]},
        {"id": "clip", "response": "x", "videos": [["images/a.png", "images/a.png"]], "image": "images/a.png"},
        {"id": "frames", "response": "x", "video": {"frames": ["images/a.png"], "fps": 4}},
        {"id": "film", "response": "x", "video": "images/a.mp4"},
        {"id": "none", "response": "x"},
        {"id": "gone", "response": "x", "image": "images/b.png"},
        {"id": "no URL", "response": "x", "image": "data:,A"},
        {"id": "m1", "response": "meet 1", "metadata": metadata},
        {"id": "m2", "response": "meet 2", "metadata": metadata},
        {"id": "hangs", "response": "hang"},
    ]
    words = ["--recipe", tmp_path / "recipe.yaml", "--quiet", "--timeout", 60, "--processes", 1]
    clip = [{"bytes": b"12", "path": "0.png"}, {"bytes": b"123", "path": "1.png"}]
    held = [{"response": "x", "image": {"bytes": b"1234567", "path": "c.png"}, "videos": [clip]}]
    pq.write_table(pa.Table.from_pylist(held), tmp_path / "r.parquet")
    expected = {
        "path": 5.0, "two": 8.0, "drawn": 1000.0, "clip": 15.0, "frames": 5.0, "none": 0.0, "m1": 0.0, "m2": 0.0,
    }  # fmt: skip
    for path, found in ((write_jsonl(tmp_path / "rows.jsonl", rows), expected), (tmp_path / "r.parquet", {None: 12.0})):
        done = mobula("score", path, *words, "--output", tmp_path / "r.json", "--results", tmp_path / "r.jsonl")
        assert done.exit_code == 0, done.output
        results = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
        totals = {row["id"]: row.get("reward") for row in results}
        assert {name: total for name, total in totals.items() if total is not None} == found
        unscored = {"images: failed": 3, "seen: timed_out": 1} if len(found) > 1 else {}
        assert json.loads((tmp_path / "r.json").read_text())["unscored"] == unscored


def test_a_slow_function_is_not_late_while_it_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "LEAST_ROWS", 4)
    monkeypatch.setattr(scorer, "MOST_ROWS", 4)
    (tmp_path / "plugin.py").write_text("import time\n\ndef score(request):\n    time.sleep(0.2)\n    return 1.0\n")
    recipe = IMAGES_RECIPE.replace("FILE", f'"{tmp_path}/plugin.py:score"').replace("processes: 2", "processes: 1")
    (tmp_path / "recipe.yaml").write_text(recipe)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"id": i, "response": "x"} for i in range(60)])
    with path.open("a") as file:
        file.write("broken\n")
    words = ["--recipe", tmp_path / "recipe.yaml", "--quiet", "--timeout", 10, "--output", tmp_path / "r.json"]
    done = mobula("score", path, *words)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["unscored"], report["average_reward"]) == ({}, 1.0)
    assert report["broken"][0]["row"] == 61
    assert [example["row"] for example in report["worst"]] == [58, 59, 60]


def test_a_run_folder_without_trajectories_is_refused(tmp_path: Path) -> None:
    refused = mobula("score", tmp_path, *AERORL)
    assert refused.exit_code == 2
    assert "replay.trajectory_log=true" in refused.output


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["rewards.components.0.weight=1"], "no rewards are chosen"),
        (["rewards=fluency"], "fluency"),
        (["rewards=aerorl", "rewards.components.2.options.regex_pattern='('"], "no regular expression"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml"),
        ([*AERORL, "--recipe", "nowhere.yaml"], "both choose the rewards"),
        ([*AERORL, "--strict"], "row 7: no JSON"),
        ([*AERORL, "--output", "/proc/nothing/report.json"], "give another path"),
        ([*AERORL, "--results", "/proc/nothing/rows.jsonl"], "/proc/nothing/rows.jsonl cannot be written"),
        ([*AERORL, "--results", "/proc"], "/proc cannot be written"),
        ([*AERORL, "--pass-threshold", "inf"], "give a finite number"),
    ],
)
def test_what_the_user_has_to_fix_is_one_message(six: Path, words: list[str], fault: str) -> None:
    with six.open("a") as file:
        file.write("broken\n")
    refused = mobula("score", six, "--quiet", *words)
    assert refused.exit_code == 2, refused.output
    assert fault in refused.output.replace("\n", " ")
    assert "Traceback" not in refused.output


def test_a_pattern_that_backtracks_without_end_costs_its_timeout(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [record("a", "a" * 60 + "b", "x")])
    pattern = "rewards.components.2.options.regex_pattern='^(a+)+$'"
    done = mobula("score", path, *AERORL, pattern, "--quiet", "--timeout", 1)
    assert done.exit_code == 1
    assert "rows 1 to 1 of" in done.output and "took longer than 1 s" in done.output.replace("\n", " ")


def test_scoring_jsonl_loads_nothing_heavy(six: Path) -> None:
    program = (
        "import json, sys\nfrom mobula.deploy.cli import app\n"
        f"try: app(['score', {str(six)!r}, 'rewards=aerorl', '--quiet'])\nexcept SystemExit: pass\n"
        f"print('loaded', json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(child.stdout.rpartition("loaded ")[2]) == []


def test_the_patterns_of_the_corruption_by_their_published_shares() -> None:
    names = Counter(pattern_of(f"chartqa::{i % 3}:{i}").name for i in range(30_000))
    expected = {"good_json_exact": 58, "format_bad_contains": 14, "grounding_hidden": 12, "wrong_answer": 11}
    expected["verbose_slow"] = 5
    assert list(expected) == [pattern.name for pattern in PATTERNS]
    for name, percent in expected.items():
        assert 100 * names[name] / 30_000 == pytest.approx(percent, abs=1.0)
    # the first 24 bits of md5("a") are 0x0cc175 = 835957, of md5("q") 0x7694f4 = 7771380
    assert pattern_of("a").name == "good_json_exact"
    assert pattern_of("q").name == "grounding_hidden"


def test_each_pattern_has_its_flaw_and_its_latency() -> None:
    found = {}
    for i in range(200):
        made = corrupt(f"id-{i}", "p", " red ")
        found[made["metadata"].pop("pattern")] = made
    expected = {
        "good_json_exact": ('{"answer": "red"}', "red", 110),
        "format_bad_contains": ("answer: red", "red", 150),
        "grounding_hidden": ('{"answer": "red"}', "not-red", 170),
        "wrong_answer": ('{"answer": "wrong-red"}', "wrong-red", 190),
        "verbose_slow": (found["verbose_slow"]["response"], "red", 1400),
    }
    for name, (response, claimed, latency_ms) in expected.items():
        metadata = {"evidence_entities": ["red"], "claimed_entities": [claimed], "latency_ms": latency_ms}
        assert (found[name]["response"], found[name]["metadata"]) == (response, metadata)
    assert json.loads(found["verbose_slow"]["response"])["answer"] == "red"
    assert len(json.loads(found["verbose_slow"]["response"])["reasoning"].split()) == 19
