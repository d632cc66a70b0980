"""The real main job, as a user starts it: every part in place, few steps; also killed in the middle and resumed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from jobs import NUM_SAMPLES, PROMPTS_PER_STEP, Job, none_left, steps_of
from runs import audited

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import EvaluationRecord
from mobula.cluster.metrics.summary import Summary
from mobula.examples.digits.digits import write_digits

pytestmark = [pytest.mark.core, pytest.mark.slow, pytest.mark.timeout(1200)]

RESUMED_STEPS = 6  # of the run that is killed on the way
SUITE = (
    "evaluation.suites={sampled: {split: validation, num_prompts: 8, num_samples: 4, temperature: 1.0, top_p: 0.9}}",
    "evaluation.save_responses=true",
    "evaluation.controls=[direct_prompt,blank_image,swapped_image,no_image]",
    "evaluation.max_control_prompts=12",
)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """transformers as the engine, two images a prompt, max_staleness=1; the driver is killed after step 3 of 6 and
    the same command is given again at once."""
    folder = tmp_path_factory.mktemp("resumed")
    data = f"data.path={few_rows(folder / 'sums')}"
    words = (
        "experiment=digits", "resources=laptop", "data=jsonl", data, "data.max_skipped_fraction=0.3",
        "data.prompt_suffix=''", "sampler=huggingface", "sampler.max_tokens=8", "learner.learning_rate=5e-4",
        "algorithm.max_staleness=1", f"num_steps={RESUMED_STEPS}", "resume=auto", "checkpoints.interval_steps=2",
        "replay.trajectory_log=true", "resources.rollout.num_workers=1",
    )  # fmt: skip
    with Job(folder, words) as job:
        job.kill_after(3)
        assert len(job.steps) < RESUMED_STEPS, "the run was over before it could be killed"
        job.finish(job.start())
        yield job


def few_rows(folder: Path) -> Path:
    """Eight questions with two images each, one whose image is gone and one whose image is half a file."""
    write_digits(folder, task="digit_sum")
    rows = (folder / "train.jsonl").read_text().splitlines()[:10]
    lost, damaged = json.loads(rows[8]), json.loads(rows[9])
    whole = (folder / damaged["image"][0]).read_bytes()
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    rows[8:] = [json.dumps(lost | {"id": "lost", "image": ["gone.png", "gone.png"]})]
    rows += [json.dumps(damaged | {"id": "damaged", "image": ["half.png", damaged["image"][1]]})]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_the_same_command_goes_on_where_the_killed_run_was(resumed: Job) -> None:
    assert "resumed from" in (resumed.run_folder / "run.log").read_text()
    found = read_run_folder(resumed.run_folder).summary
    assert (found.status, found.version, found.num_steps) == ("done", RESUMED_STEPS, RESUMED_STEPS)


def test_steps_after_the_checkpoint_are_taken_again_and_not_sampled_again(resumed: Job) -> None:
    found = read_run_folder(resumed.run_folder)
    recovered = found.steps[-1].counters["recovered"]
    assert recovered["steps"] >= 1
    assert recovered.keys() <= {"steps", "groups"}, "nothing was lost"
    # The checkpoint of version 2 is written in the background and may be incomplete when the run is killed.
    log = (resumed.run_folder / "run.log").read_text()
    assert re.search(r"recovered from version [02] to [3-5] by the journal", log)


@pytest.mark.exhaustive
def test_a_run_that_was_killed_and_went_on_is_replayed_to_the_very_same_weights(resumed: Job) -> None:
    """Its journal is correct, and its trajectory log has every step."""
    resumed.finish(resumed.start_command("replay", str(resumed.run_folder)))
    assert f"{RESUMED_STEPS} steps trained again" in resumed.output
    assert resumed.output.strip().endswith("largest difference of a weight from the run's own policy: 0")
    updates = (resumed.run_folder / "replay" / "updates.jsonl").read_text().splitlines()
    losses = [step.values["loss"] for step in read_run_folder(resumed.run_folder).steps]
    assert [json.loads(line)["loss"] for line in updates] == losses


def test_recorded_responses_are_scored_again_alike(resumed: Job) -> None:
    resumed.finish(resumed.start_command("score", str(resumed.run_folder), "--results", str(resumed.folder / "again")))
    again = [json.loads(line) for line in (resumed.folder / "again").read_text().splitlines()]
    files = sorted((resumed.run_folder / "trajectories").glob("step-*.parquet"))
    recorded = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert len(again) == RESUMED_STEPS * PROMPTS_PER_STEP * NUM_SAMPLES
    assert [row["reward"] for row in again] == [pytest.approx(row["reward"]["value"], abs=1e-6) for row in recorded]


def test_no_step_is_missing_or_twice_after_a_resume(resumed: Job) -> None:
    assert resumed.steps == list(range(1, RESUMED_STEPS + 1))
    records = read_records(resumed.run_folder / "metrics.jsonl")
    evaluated = [record.version for record in records if isinstance(record, EvaluationRecord)]
    assert evaluated == [0, RESUMED_STEPS]


def test_with_max_staleness_1_no_trained_token_is_older_than_one_step(resumed: Job) -> None:
    found = read_run_folder(resumed.run_folder)
    lags = {lag for step in found.steps for lag in step.staleness}
    assert lags <= {0, 1}
    assert 1 in lags, "rollouts never ran ahead of the learner: nothing was asynchronous"
    assert set(found.summary.staleness) == lags


def test_two_images_a_prompt_agree_in_engine_and_learner(resumed: Job) -> None:
    """Every step is compared: on its tokens of the current version, or on fresh ones where it has none. Steps that are
    taken again from the journal have no engine that could sample fresh ones."""
    steps = read_run_folder(resumed.run_folder).steps
    gaps = [step.values["logprob_gap_max"] for step in steps if "logprob_gap_max" in step.values]
    assert max(gaps) <= 1e-3
    assert len(gaps) >= len(steps) - steps[-1].counters["recovered"]["steps"]


def test_bad_samples_are_skipped_counted_and_named_in_the_report(resumed: Job) -> None:
    found = read_run_folder(resumed.run_folder)
    assert found.summary.skipped == {"missing_file": 1, "bad_media": 1}
    names = {row.sample_id for row in found.skipped}
    assert "damaged" in names
    assert any("(lost)" in name for name in names)
    page = (resumed.run_folder / "report.html").read_text()
    assert "half.png" in page
    assert "gone.png" in page


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two vLLM engines and two FSDP2 ranks in turns, max_staleness=0."""
    folder = tmp_path_factory.mktemp("on_policy")
    words = ("experiment=digits", "resources=laptop_colocated", f"data.path={folder / 'digits'}", "num_steps=4")
    with Job(folder, (*words, "algorithm.max_staleness=0", "weight_sync.canary_interval=1", *SUITE)) as job:
        job.finish(job.start())
        yield job


@pytest.fixture(scope="module")
def report(on_policy: Job) -> RunFolder:
    return read_run_folder(on_policy.run_folder)


@pytest.fixture(scope="module")
def summary(report: RunFolder) -> Summary:
    return report.summary


def test_the_summary_holds_everything_about_the_run(on_policy: Job, summary: Summary) -> None:
    written = json.loads((on_policy.run_folder / "summary.json").read_text())
    assert set(written) >= {
        "accuracy_before", "accuracy_after", "seed", "num_steps", "samples_per_s", "tokens_per_s", "seconds",
        "logprob_gap_mean", "logprob_gap_max", "staleness", "weight_syncs", "restarts", "rejected", "sampler",
        "learner_backend", "learner_ranks", "rollout_actors", "media_bytes_unique", "media_bytes_referenced",
    }  # fmt: skip
    assert [f.name for f in fields(summary) if getattr(summary, f.name) is None] == []
    assert (summary.status, summary.version, summary.num_steps) == ("done", 4, 4)
    assert (summary.sampler, summary.learner_backend) == ("vllm", "fsdp2")
    assert (summary.learner_ranks, summary.rollout_actors, summary.seed) == (2, 2, 0)
    assert summary.weight_syncs == 5
    assert (summary.restarts, summary.rejected, summary.skipped) == (0, {}, {})
    assert (on_policy.folder / "runs" / "latest").resolve() == on_policy.run_folder.resolve()


def test_the_final_line_prints_both_accuracies_and_the_reports_path(on_policy: Job, summary: Summary) -> None:
    last = on_policy.output.strip().splitlines()[-1]
    before, after = summary.accuracy_before, summary.accuracy_after
    assert f"held-out score {before:.3g} after the warm start, {after:.3g} after RL" in last, "by the function's name"
    assert last.endswith(str(on_policy.run_folder / "report.html"))


def test_a_suite_is_evaluated_with_its_own_decoding_and_responses_are_kept(on_policy: Job, report: RunFolder) -> None:
    before, after = report.suites["sampled"]
    assert (before.version, after.version, before.num) == (0, 4, 8 * 4)
    assert before.values["pass_at_1"] == pytest.approx(before.accuracy)
    assert before.values["pass_at_1"] <= before.values["pass_at_2"] <= before.values["pass_at_4"]
    rows = [json.loads(line) for line in (on_policy.run_folder / "evaluations/sampled-4.jsonl").open()]
    assert len(rows) == 8 and all(len(row["predictions"]) == len(row["correct"]) == 4 for row in rows)
    assert after.accuracy == pytest.approx(sum(sum(row["correct"]) for row in rows) / 32)
    assert any(len(set(row["predictions"])) > 1 for row in rows), "sampled, not greedy"


def test_controls_are_scored_on_the_same_rows_and_the_gain_over_the_best_is_said(
    on_policy: Job, report: RunFolder, summary: Summary
) -> None:
    names = [gain.control for gain in summary.controls]
    assert sorted(names) == ["blank_image", "direct_prompt", "no_image", "swapped_image"]
    assert [gain.num for gain in summary.controls] == [12] * 4
    for name in names:
        versions = [record.version for record in report.suites[f"held_out.{name}"]]
        assert versions == ([0] if name == "direct_prompt" else [0, 4])
        assert [record.num for record in report.suites[f"sampled.{name}"]] == [8 * 4] * len(versions)
    best = summary.controls[0]
    assert f"{best.gain:+.3f} over the best control ({best.control} " in on_policy.output
    held_out = {path.name for path in (on_policy.run_folder / "evaluations").glob("rows-held_out-*.json")}
    assert held_out == {"rows-held_out-0.json", "rows-held_out-4.json"}


def test_with_max_staleness_0_every_trained_token_has_the_current_version(report: RunFolder, summary: Summary) -> None:
    assert set(summary.staleness) == {0}
    assert summary.staleness[0] == sum(step.values["num_tokens"] for step in report.steps)
    assert [set(step.staleness) for step in report.steps] == [{0}] * 4


def test_engine_and_learner_agree_on_every_token(summary: Summary) -> None:
    assert summary.logprob_gap_mean <= 1e-5
    assert summary.logprob_gap_max <= 1e-3
    assert summary.logprob_gap_max > 0, "nothing was compared"


def test_the_first_step_starts_at_ratio_1_and_kl_0(report: RunFolder) -> None:
    first = report.steps[0].values
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert first["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["kl"] == pytest.approx(0, abs=1e-4)
    assert first["clip_fraction"] == 0
    later = [step.values["kl"] for step in report.steps[1:]]
    assert max(later) > 1e-6, "the policy leaves its reference"


def test_the_canary_compared_engine_and_learner_after_every_push(report: RunFolder, summary: Summary) -> None:
    assert 0 < summary.canary_max <= 1e-5
    assert all("canary" in step.values for step in report.steps)


def test_an_image_is_stored_once_however_many_siblings_share_it(report: RunFolder, summary: Summary) -> None:
    referenced = [step.values["media_bytes_referenced"] for step in report.steps]
    unique = [step.values["media_bytes_unique"] for step in report.steps]
    one_image = max(referenced) / (PROMPTS_PER_STEP * NUM_SAMPLES)
    assert one_image > 16 * 1176 * 4, "56 x 56 pixels are 16 patches of 1176 numbers"
    grown = [later - earlier for earlier, later in zip(unique, unique[1:], strict=False)]
    assert max(grown) <= 1.1 * PROMPTS_PER_STEP * one_image
    assert summary.media_bytes_referenced == sum(referenced)
    num_prompts = 2 * 16 + 8 + 16 + 4 * PROMPTS_PER_STEP  # warm start, its checks, evaluation, RL
    assert summary.media_bytes_unique <= 1.1 * num_prompts * one_image


def test_every_worker_has_a_log_and_the_console_has_the_runs_lines_alone(on_policy: Job) -> None:
    logs = {path.name: path.read_text() for path in (on_policy.run_folder / "logs").iterdir()}
    assert set(logs) == {
        *(f"rollout-{n}.log" for n in range(2)), *(f"learner-{n}.log" for n in range(2)), "reference-0.log",
        "reward-0.log",
    }  # fmt: skip
    for name, text in logs.items():
        assert text.startswith("===== process ")
        assert text.partition("\n")[0].endswith(name.removesuffix(".log").replace("-", "/"))
    assert "pid=" not in on_policy.output


def test_the_report_shows_curves_plan_and_samples(on_policy: Job, report: RunFolder) -> None:
    page = (on_policy.run_folder / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    for worker in report.plan:
        assert worker.role in page
    assert {worker.role for worker in report.plan} == {"learner", "rollout", "reference", "reward"}
    assert "data:image/png;base64," in page
    assert len(report.samples.samples) > 0
    assert [e.version for e in report.evaluations] == [0, 4]


def test_the_trained_policy_is_left_in_a_form_that_loads(on_policy: Job) -> None:
    from safetensors.torch import load_file

    run = on_policy.run_folder
    start, trained = [load_file(run / name / "model.safetensors") for name in ("reference", "policy")]
    assert start.keys() == trained.keys() == load_file(on_policy.folder / "model" / "model.safetensors").keys()
    assert any((start[name] != trained[name]).any() for name in start)


def test_a_run_that_is_done_leaves_no_process_behind(on_policy: Job) -> None:
    none_left(on_policy.marks[0])


def test_the_audit_holds_with_vllm_and_after_a_kill_with_staleness_1(on_policy: Job, resumed: Job) -> None:
    assert audited(on_policy.run_folder).findings == []
    result = audited(resumed.run_folder)
    assert result.findings == []
    assert [part.status for part in result.history.parts] == [None, "done"]
    assert result.history.num_remade >= result.history.num_void - 1, "at most the step of the kill is sampled again"


@pytest.mark.exhaustive
def test_a_run_that_moved_is_shown_evaluated_and_goes_on_from_elsewhere(resumed: Job, tmp_path: Path) -> None:
    """Its folder and its data lie in another place; commands name it by its name below `runs`."""
    run = shutil.copytree(resumed.run_folder, tmp_path / "runs" / "moved")
    data = shutil.copytree(resumed.folder / "sums", tmp_path / "elsewhere")
    with Job(tmp_path, (), directory=tmp_path) as job:
        job.write_reward()
        job.finish(job.start_command("status", "moved"))
        assert f"run moved is done at version {RESUMED_STEPS}, after {RESUMED_STEPS} steps" in job.output
        assert job.output.strip().endswith(f"report: {run.relative_to(tmp_path) / 'report.html'}")
        job.finish(job.start_command("evaluate", "moved", "--output", "scores", "evaluation.num_prompts=8"))
        [result] = json.loads((tmp_path / "scores" / "evaluation.json").read_text())
        assert (result["num_scored"], result["measure"]) == (8, "score")
        assert job.start_command("resume", "moved").wait(60) == 2
        assert f"run moved has trained its {RESUMED_STEPS} steps: add num_steps=+10" in job.output
        job.finish(job.start_command("resume", "moved", "num_steps=+2", f"data.path={data}"))
        for mark in job.marks:
            none_left(mark)
    assert "the data moved from" in (run / "run.log").read_text()
    assert steps_of(run) == list(range(1, RESUMED_STEPS + 3))
    assert resumed.steps == list(range(1, RESUMED_STEPS + 1)), "the run itself is as it was"


def test_no_process_of_a_killed_run_survives(resumed: Job) -> None:
    """Runs last: Ray's own agents give up about a minute after the kill of their cluster; all else ends at once."""
    for mark in resumed.marks:
        none_left(mark)
