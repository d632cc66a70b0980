"""Bytes by role, phase and place; what does not fit is refused with settings that make it fit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from tiny_checkpoints import checkpoint, qwen, shape_7b
from typer.testing import CliRunner

from benchmarks import learner_memory
from benchmarks.harness.report import BASELINES, read
from mobula.cluster.errors import PreflightError
from mobula.cluster.runtime.placement import needed_roles
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.deploy.cli import app
from mobula.deploy.doctor import this_machine as doctor
from mobula.deploy.host.machine import Machine
from mobula.deploy.planning.clusters import PlannedNode, described_nodes, read_cluster
from mobula.deploy.planning.memory import (
    MAX_WHOLE_GRADIENT_BYTES,
    MIB,
    PROCESS,
    SAMPLING,
    SYNC,
    TORCH_REWARDS,
    TRAINING,
    trained_parameters,
    worker_memory,
)
from mobula.deploy.planning.plan_command import GIB, changed, plan_memory, planned_engine, refuse_shortfalls, remedies
from mobula.learner.backends import native
from mobula.learner.policies.pretrained import smollm2_config
from mobula.learner.policies.shapes import ModelShape, shape_of_values
from mobula.rewards.functions import BUILT_IN

REPOSITORY = Path(__file__).parents[4]
NUM_7B = 8_292_166_656  # parameters of Qwen2.5-VL 7B, embeddings not tied

SMOLLM2 = smollm2_config().to_dict()  # 135M parameters


@cache
def config(*words: str) -> RunConfig:
    return load_config(["experiment=own", *words], is_complete=False)


def fitting(words: Sequence[str], way: str, shape: ModelShape, nodes: Sequence[PlannedNode], *roles: str) -> RunConfig:
    """The configuration with the settings of a proposal, with which it has to fit."""
    better = load_config(overridden(["experiment=own", *words], way.split()), is_complete=False)
    assert plan_memory(better, shape, nodes, *([roles] if roles else [])).shortfalls == ()
    return better


def test_state_of_the_learner_is_what_its_backend_keeps() -> None:
    shape = shape_7b()
    assert shape.num_parameters == NUM_7B
    single = worker_memory(config("resources=two_gpu", "learner=single"), shape, "learner").device[TRAINING]
    assert (single["gradients"], single["optimizer"]) == (4 * NUM_7B, 8 * NUM_7B)
    assert single["weights"] == (4 + 2) * NUM_7B  # float32, and the copies that autocast makes
    four = worker_memory(config("resources=eight_gpu_split"), shape, "learner").device[TRAINING]
    assert four["optimizer"] == 2 * NUM_7B
    computing = shape.num_parameters - shape.num_in_blocks + 2 * shape.largest_block  # the root, and two blocks
    assert four["gradients"] == NUM_7B + 4 * computing < 2 * NUM_7B  # the shard, and those that are exchanged
    assert NUM_7B < four["weights"] < 1.5 * NUM_7B
    words = ("resources=eight_gpu_split", "resources.learner.num_workers=8", "resources.learner.replicas=2")
    replica = worker_memory(config(*words), shape, "learner").device[TRAINING]
    assert (replica["optimizer"], replica["weights"]) == (four["optimizer"], four["weights"])
    zero = worker_memory(config("resources=eight_gpu_split", "learner=deepspeed"), shape, "learner").device[TRAINING]
    stage_3 = config("resources=eight_gpu_split", "learner=deepspeed", "learner.zero_stage=3")
    sharded = worker_memory(stage_3, shape, "learner").device[TRAINING]
    assert zero["weights"] - sharded["weights"] == 3 * NUM_7B


def test_state_in_bfloat16_takes_half_the_memory() -> None:
    shape, words = shape_7b(), ("resources=eight_gpu_split", "learner.activation_checkpointing=blocks")
    whole, half = (
        worker_memory(config(*words, f"learner.master_dtype={dtype}"), shape, "learner")
        for dtype in ("float32", "bfloat16")
    )
    shard = NUM_7B // 4
    saved = {name: size - half.device[TRAINING][name] for name, size in whole.device[TRAINING].items()}
    assert saved == {**dict.fromkeys(saved, 0), "weights": 2 * shard, "gradients": 2 * shard, "optimizer": 4 * shard}
    assert half.host["checkpoint"] == whole.host["checkpoint"] // 2
    adapters = worker_memory(config(*words, "learner.master_dtype=bfloat16", "policy.lora.rank=8"), shape, "learner")
    plain = worker_memory(config(*words, "policy.lora.rank=8"), shape, "learner")
    assert plain.device[TRAINING]["weights"] - adapters.device[TRAINING]["weights"] == 2 * shard
    assert plain.device[TRAINING]["optimizer"] == adapters.device[TRAINING]["optimizer"]


def test_learner_of_the_training_service_has_gradients_and_optimizer_state_of_adapters_alone() -> None:
    shape = shape_7b()
    words = ("resources=laptop_in_turns", "learner=single", "sampler=vllm", "sampler.adapters.max_served=4")
    found = config(*words, "sampler.adapters.max_rank=16", "training_service.max_models=3")
    assert needed_roles(found) == ("learner", "rollout")
    training = worker_memory(found, shape, "learner").device[TRAINING]
    layers = [spec.shape for spec in shape.manifest.tensors if "layers" in spec.name and len(spec.shape) == 2]
    adapters = 3 * 4 * 16 * sum(rows + columns for rows, columns in layers)
    assert (training["gradients"], training["optimizer"]) == (2 * adapters, 2 * adapters)
    assert training["weights"] == 4 * NUM_7B + adapters
    small, large = (
        worker_memory(config(*words, f"learner.tokens_per_microbatch={tokens}"), shape, "learner").device[TRAINING]
        for tokens in (2048, 16384)
    )
    assert large["activations"] == 8 * small["activations"], "clients fill micro-batches, whatever a step of a run has"


def test_ranks_of_a_service_for_all_weights_keep_their_shard_of_the_first_weights() -> None:
    words = ("resources=eight_gpu_split", "training_service.weights=full")
    one = worker_memory(config("resources=two_gpu", "learner=single", words[1]), shape_7b(), "learner")
    four = worker_memory(config(*words), shape_7b(), "learner")
    assert (one.host["initial"], four.host["initial"]) == (4 * NUM_7B, NUM_7B)
    frozen = worker_memory(config(*words, "policy.freeze=[visual.]"), shape_7b(), "learner")
    assert frozen.host["initial"] < NUM_7B


def test_a_service_for_all_weights_is_offered_no_settings_of_runs() -> None:
    words, nodes = ("resources=eight_gpu_split", "training_service.weights=full"), described_nodes("1x8x50GB")
    ways = remedies(config(*words), shape_7b(), nodes, ("learner", "rollout"))
    assert len(ways) == 3
    unfit = ("policy.lora", "reference.", "algorithm.", "sequence_parallel")
    assert not [way for way in ways if any(key in way for key in unfit)]
    for way in ways:
        fitting(words, way, shape_7b(), nodes, "learner", "rollout")


def test_small_gradients_are_whole_between_micro_batches() -> None:
    assert MAX_WHOLE_GRADIENT_BYTES == native.MAX_WHOLE_GRADIENT_BYTES
    words, shape = ("resources=eight_gpu_split", "policy.lora.rank=16"), shape_7b()
    num = sum(spec.num_bytes // 4 for spec in trained_parameters(config(*words), shape))
    assert 4 * num < MAX_WHOLE_GRADIENT_BYTES
    assert worker_memory(config(*words), shape, "learner").device[TRAINING]["gradients"] == 5 * num
    one = config(*words, "learner.tokens_per_microbatch=200000")
    assert worker_memory(one, shape, "learner").device[TRAINING]["gradients"] <= 5 * num


def test_only_what_is_trained_has_gradients_and_moments() -> None:
    shape = shape_7b()
    vision = sum(s.num_bytes // 4 for s in shape.manifest.tensors if s.name.startswith("visual."))
    frozen = worker_memory(config("resources=two_gpu", "learner=single", "policy.freeze=[visual.]"), shape, "learner")
    assert frozen.device[TRAINING]["optimizer"] == 8 * (NUM_7B - vision)
    adapters = config("resources=two_gpu", "learner=single", "policy.lora.rank=16")
    num = sum(spec.num_bytes // 4 for spec in trained_parameters(adapters, shape))
    assert worker_memory(adapters, shape, "learner").device[TRAINING]["optimizer"] == 8 * num < NUM_7B // 10
    muon = worker_memory(config("resources=two_gpu", "learner=single", "learner.optimizer=muon"), shape, "learner")
    words = ("resources=two_gpu", "learner=single", "learner.optimizer=adamw_8bit")
    found = worker_memory(config(*words), shape, "learner").device[TRAINING]["optimizer"]
    assert 2 * NUM_7B < found < 2.1 * NUM_7B
    assert 4 * NUM_7B < muon.device[TRAINING]["optimizer"] < 6 * NUM_7B


def test_engine_has_weights_cache_and_a_bucket_while_weights_come() -> None:
    engine = worker_memory(config("resources=two_gpu", "sampler.vllm.kv_cache_bytes=5000000000"), shape_7b(), "rollout")
    assert engine.device[SAMPLING]["weights"] == 2 * NUM_7B
    assert engine.device[SAMPLING]["kv_cache"] == 5_000_000_000
    assert "sync" not in engine.device[SAMPLING]
    assert engine.device[SYNC]["sync"] == 2 * shape_7b().largest_tensor  # larger than weight_sync.bucket_bytes


def test_a_learner_rank_has_the_memory_that_engines_of_its_host_read() -> None:
    def shared(*words: str) -> tuple[int, int]:
        learner = worker_memory(config(*words), shape_7b(), "learner")
        return learner.host.get("shared", 0), learner.device[TRAINING].get("shared", 0)

    assert shared("resources=laptop") == (16 * 2**20, 0)
    engines = ("resources=laptop", "resources.rollout.num_workers=3")
    assert shared(*engines, "weight_sync.wave_size=2") == (32 * 2**20, 0)
    assert shared(*engines, "weight_sync.same_host=network") == (0, 0)
    assert shared("resources=two_gpu") == (0, 0)  # between GPUs of a host NCCL stays
    assert shared("resources=one_gpu_colocated")[1] == 64 * 2**20


def test_changes_need_a_copy_of_the_pushed_weights_in_host_memory() -> None:
    def pushed(role: str, *words: str) -> int:
        return worker_memory(config(*words, "weight_sync.payload=delta"), shape_7b(), role).host.get("pushed", 0)

    two_senders = ("resources=gpu_1", "resources.learner.num_workers=2", "resources.learner.num_gpus=1")
    assert pushed("learner", "resources=two_gpu") == pushed("rollout", "resources=two_gpu") == 2 * NUM_7B
    assert pushed("learner", *two_senders) == NUM_7B
    assert pushed("rollout", "resources=multi_node_large") == 4 * 2 * NUM_7B
    assert pushed("rollout", "resources=two_gpu", "sampler=huggingface") == 0
    assert pushed("reference", "resources=two_gpu") == 0
    assert "pushed" not in worker_memory(config("resources=two_gpu"), shape_7b(), "learner").host


def test_workers_on_cpu_hold_what_was_measured_with_a_released_model() -> None:
    """SmolLM2-135M: freed memory and packed copies, fitted in docs/measured.md."""
    shape = shape_of_values(SMOLLM2)
    found = worker_memory(config("policy.model=some"), shape, "rollout")
    weights = 4 * 134_515_008
    assert found.host["packed"] == 2 * weights and found.host["kept"] == weights < 576 * 2**20
    assert "packed" not in worker_memory(config("policy.model=some"), shape, "learner").host
    assert worker_memory(config("policy.model=some"), shape, "reference").host["kept"] == weights // 2
    assert worker_memory(config("resources=two_gpu"), shape, "rollout").host.keys() == {"process"}


def test_a_large_state_in_host_memory_is_saved_without_a_copy() -> None:
    large, small = (shape_of_values({**SMOLLM2, "num_hidden_layers": n, "vocab_size": 256}) for n in (30, 2))
    for resources, shape, is_copied in [("two_gpu", large, True), ("laptop", small, True), ("laptop", large, False)]:
        words = (f"resources={resources}", "learner=single", "resources.learner.num_workers=1")
        host = worker_memory(config(*words), shape, "learner").host
        assert host.get("checkpoint", 0) == (12 * shape.num_parameters if is_copied else 0)


def test_a_reward_process_holds_torch_where_one_of_its_functions_computes_with_it() -> None:
    def process(*words: str) -> int:
        return worker_memory(config("resources=laptop", *words), qwen(hidden=1024, layers=8), "reward").host["process"]

    by_model, by_engine = (
        f"rewards.components=[{{name: accuracy, function: {function}, weight: 1.0}}]"
        for function in ("reward_model", "vllm_judge")
    )
    assert process() < 200 * 2**20 < process(by_model) < process(by_engine) == PROCESS["vllm"]
    modules = {name: factory.partition(":")[0].removeprefix("mobula.") for name, factory in BUILT_IN.items()}
    texts = {name: (REPOSITORY / f"{module.replace('.', '/')}.py").read_text() for name, module in modules.items()}
    found = {name for name, text in texts.items() if re.search("^import torch", text, re.MULTILINE)}
    assert {*TORCH_REWARDS, "vllm_judge"} == found


def test_an_engine_over_two_gpus_has_half_the_weights_on_each() -> None:
    split = ("resources.rollout.tensor_parallel=2", "resources.rollout.num_gpus=2", "resources.rollout.num_workers=2")
    one, two = config("resources=eight_gpu_split"), config("resources=eight_gpu_split", *split)
    alone, each = (worker_memory(found, shape_7b(), "rollout") for found in (one, two))
    assert each.device[SAMPLING]["weights"] == alone.device[SAMPLING]["weights"] // 2
    assert each.device[SAMPLING]["kv_cache"] == alone.device[SAMPLING]["kv_cache"]
    assert each.device[SYNC]["sync"] == alone.device[SYNC]["sync"], "every rank receives whole buckets"
    assert each.host["process"] == 2 * alone.host["process"]
    plan = plan_memory(two, shape_7b(), described_nodes("1x8x80GB"))
    engines = plan.placement.of_role("rollout")
    gpus = {gpu for engine in engines for gpu in engine.gpus}
    assert len(gpus) == 4
    shown = {d.place: d for d in plan.demands if any(w.startswith("rollout/") for w in d.workers)}
    assert {f"GPU {gpu}" for gpu in gpus} <= set(shown)


def test_turns_on_one_gpu_take_the_most_of_a_phase_and_not_the_sum() -> None:
    shape, nodes = qwen(hidden=1024, layers=8), described_nodes("1x1x80GB")
    cache = "sampler.vllm.kv_cache_bytes=17179869184"
    shared = plan_memory(config("resources=gpu_1", cache), shape, nodes)
    in_turns = plan_memory(config("resources=one_gpu_colocated", cache), shape, nodes)
    assert [d.place for d in in_turns.demands] == ["GPU 0", "host memory"]
    assert shared.demands[0].num_bytes > in_turns.demands[0].num_bytes
    found = config("resources=one_gpu_colocated")
    engine, learner = (worker_memory(found, shape, role) for role in ("rollout", "learner"))
    assert "kv_cache" not in {**engine.device[TRAINING], **engine.device[SYNC]}
    assert "moved" not in engine.host, "the weights of an engine that sleeps are discarded"
    keeping = worker_memory(config("resources=one_gpu_colocated", "resources.sleep_level=1"), shape, "rollout")
    assert keeping.host["moved"] == engine.device[SAMPLING]["weights"]
    assert learner.host["moved"] > 0 and "weights" not in learner.device[SAMPLING]


def test_what_does_not_fit_is_named_with_settings_that_were_tried() -> None:
    found, nodes = config("resources=eight_gpu_split"), described_nodes("1x8x50GB")
    plan = plan_memory(found, shape_7b(), nodes)
    with pytest.raises(PreflightError) as caught:
        refuse_shortfalls(found, shape_7b(), nodes, plan)
    message = str(caught.value)
    assert "resources=eight_gpu_split does not fit into memory" in message
    assert "node, GPU 0:" in message and "GiB short (learner/0)" in message
    ways = remedies(found, shape_7b(), nodes)
    assert len(ways) == 3 and all(f"  {way}" in message for way in ways)
    for way in ways:
        fitting(["resources=eight_gpu_split"], way, shape_7b(), nodes)


def test_on_one_cpu_node_fewer_processes_are_proposed_and_never_more_ranks() -> None:
    """SmolLM2-135M: two learner ranks and two engines of `resources=laptop` against one of each."""
    found, shape = config("policy.model=some"), shape_of_values(SMOLLM2)
    needed = plan_memory(found, shape, described_nodes("1x0x1GB:2x1TB")).demands[0].num_bytes
    for size in (0.9, 0.75, 0.6):
        nodes = described_nodes(f"1x0x1GB:2x{size * needed / 1e9:.2f}GB")
        ways = remedies(found, shape, nodes)
        assert ways, "something saves a tenth, a quarter, two fifths"
        for way in ways:
            better = fitting(["policy.model=some"], way, shape, nodes)
            assert better.resources.learner.num_workers <= 2 and better.sampler.vllm.kv_cache_bytes >= 4 * 60_456_960
    assert any("resources=laptop_in_turns" in way for way in ways)


def test_a_model_that_no_setting_helps_is_refused_with_that_message() -> None:
    found, nodes = config("resources=two_gpu"), described_nodes("1x2x8GB")
    with pytest.raises(PreflightError, match="none of the settings that save memory is enough"):
        refuse_shortfalls(found, shape_7b(), nodes, plan_memory(found, shape_7b(), nodes))


def test_settings_that_contradict_are_not_proposed() -> None:
    found = config("resources=two_gpu", "learner=single")
    ways = remedies(found, shape_7b(), described_nodes("1x2x80GB"))
    assert not any("resources.learner.num_workers" in way for way in ways)
    assert changed(found, {"policy.lora.rank": 8}).policy.lora.rank == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [("2x8", "--nodes 2x8 is no description"), ("2x8x80", "is no size"), ("ax8x80GB", "NODESxGPUSxMEMORY")],
)
def test_a_description_that_cannot_be_read_is_refused_with_how_to_write_one(text: str, message: str) -> None:
    with pytest.raises(PreflightError, match=message):
        described_nodes(text)


def test_a_cluster_file_describes_nodes_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "nodes:\n"
        "  - {name: big, count: 2, gpus: 8, gpu_memory: 80GiB, cpus: 96, memory: 1TiB, labels: {zone: a},\n"
        "     resources: {licence: 2}}\n"
        "  - {name: cpu, cpus: 32, memory: 64GiB}\n"
    )
    nodes = read_cluster(path)
    assert nodes[0].resources.labels == (("zone", "a"),) and nodes[0].resources.custom == (("licence", 2.0),)
    assert [(n.node_id, n.resources.num_gpus, n.gpu_bytes, n.host_bytes) for n in nodes] == [
        ("big-0", 8, 80 * GIB, 1024 * GIB),
        ("big-1", 8, 80 * GIB, 1024 * GIB),
        ("cpu", 0, None, 64 * GIB),
    ]
    for text, message in [
        ("nodes: []", "nodes"),
        ("nodes: [{name: a}]", "nodes.0.cpus"),
        ("nodes: [{name: a, cpus: 1, gpu: 8}]", "nodes.0.gpu"),
        ("nodes: [{name: a, cpus: 1, gpus: 8}]", "no gpu_memory"),
        ("- a: [", "is no YAML"),
    ]:
        path.write_text(text)
        with pytest.raises(PreflightError, match=message):
            read_cluster(path)
    with pytest.raises(PreflightError, match="cannot be read"):
        read_cluster(tmp_path / "missing.yaml")


def test_plan_shows_memory_for_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    model = f"policy.model={checkpoint(tmp_path / 'model')}"
    good = CliRunner().invoke(
        app, ["plan", "experiment=own", model, "resources=maye_8", "--nodes", "1x8x141GB:96x2TB"], env={"COLUMNS": "80"}
    )
    assert good.exit_code == 0, good.stderr
    assert all(word in good.stdout for word in ("optimizer", "kv cache", "sync", "GPU 0 to 6", "10 workers fit"))
    assert "…" not in good.stdout, "80 characters suffice"
    bad = CliRunner().invoke(app, ["plan", "experiment=own", model, "resources=two_gpu", "--nodes", "1x2x80GB"])
    assert bad.exit_code == 2
    assert "GiB short (learner/0)" in bad.stderr and "policy.lora.rank=16" in bad.stderr
    both = CliRunner().invoke(app, ["plan", "--nodes", "1x8x80GB", "--address", "auto"])
    assert both.exit_code == 2 and "give one of them" in both.stderr


def test_a_run_that_does_not_fit_ends_before_anything_loads(tmp_path: Path) -> None:
    """The folder holds no weights: whatever would load them fails in another way."""
    found = config(f"policy.model={checkpoint(tmp_path / 'model')}", "resources=two_gpu")
    with pytest.raises(PreflightError, match="does not fit into memory"):
        planned_engine(found, described_nodes("1x2x80GB"), ("learner", "rollout"))
    unknown = config("policy.model=/no/such/model", "resources=two_gpu")
    assert planned_engine(unknown, described_nodes("1x2x80GB"), ("learner", "rollout")) is None


def test_adapters_of_layers_that_the_model_lacks_are_refused_with_those_that_it_has() -> None:
    words = ("resources=two_gpu", "policy.lora.rank=16", "policy.lora.target_modules=[q_proj, none_such]")
    with pytest.raises(PreflightError, match="no matrix of the model is called none_such; there are .*q_proj"):
        plan_memory(config(*words), shape_7b(), described_nodes("1x2x80GB"))


def test_doctor_plans_memory() -> None:
    small = Machine(2, 0, 2 * GIB, GIB, frozenset(), total_memory_bytes=4 * GIB)
    digits = load_config(["experiment=digits"])
    found = doctor.check_planned_memory(digits, small)
    assert found.verdict is doctor.Verdict.MISSING and "GiB short" in found.action
    large = Machine(2, 0, 32 * GIB, GIB, frozenset(), total_memory_bytes=32 * GIB)
    assert doctor.check_planned_memory(digits, large).verdict is doctor.Verdict.OK
    unnamed = doctor.check_planned_memory(config(), large)
    assert unnamed.verdict is doctor.Verdict.WARNING and "policy.model" in unnamed.action


def test_the_figure_of_a_learner_rank_is_within_15_percent_of_the_benchmark() -> None:
    baseline = read(BASELINES / "learner_memory.json").findings
    shape = shape_of_values({"model_type": "qwen2", "tie_word_embeddings": True, **baseline.settings["model"]})
    memory = worker_memory(config(*learner_memory.SETTINGS), shape, "learner")
    planned = (memory.peak + sum(memory.host.values())) / MIB
    assert planned == pytest.approx(max(baseline.series[phase].median for phase in learner_memory.PHASES), rel=0.15)


NAMES = {"one_gpu_16gb": ("Qwen/Qwen2.5-VL-3B-Instruct", 16), "one_gpu_24gb": ("Qwen/Qwen2.5-VL-7B-Instruct", 24)}


@pytest.mark.parametrize("preset", NAMES)
def test_a_base_of_4_bits_fits_one_card_by_the_name_of_its_model_alone(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the plan are the base in 4 bits, one dequantised weight, and adapters; nothing is downloaded."""

    def unreachable(*_: object, **__: object) -> None:
        raise AssertionError("the plan asked the network")

    monkeypatch.setattr("socket.create_connection", unreachable)
    model, size = NAMES[preset]
    words = ["plan", "experiment=own", f"policy.model={model}", "data.path=x", f"resources={preset}"]
    shown = CliRunner().invoke(app, [*words, "--nodes", f"1x1x{size}GB"])
    assert shown.exit_code == 0, shown.output
    rows = {
        name: float(found[1])
        for name in ("quantised", "dequantised", "adapters", "weights", "most")
        if (found := re.search(rf"│ {name} +│ ([0-9.]+) ", shown.output))
    }
    num_quantised = 2.77e9 if "3B" in model else 6.53e9  # of the decoder's linear layers
    assert rows["quantised"] == pytest.approx(num_quantised * (0.5 + 1 / 64) / 2**30, rel=0.02)
    assert rows["dequantised"] < 0.5 and 0 < rows["adapters"] < 0.5
    assert rows["quantised"] + rows["dequantised"] + rows["adapters"] + rows["weights"] < rows["most"] < size
    whole = CliRunner().invoke(
        app,
        [
            *words,
            "policy.quantisation=none",
            "learner.master_dtype=float32",
            "learner.optimizer=adamw",
            "--nodes",
            f"1x1x{size}GB",
        ],
    )
    assert whole.exit_code == 2 and "GiB short" in whole.output


def test_a_config_json_alone_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2), encoding="utf-8")
    words = ["plan", "experiment=own", f"policy.model={tmp_path}", "data.path=x", "resources=one_gpu_16gb"]
    shown = CliRunner().invoke(app, [*words, "--nodes", "1x1x16GB"])
    assert shown.exit_code == 0 and "quantised" in shown.output, shown.output


def test_a_training_service_holds_its_base_in_4_bits() -> None:
    shape = shape_7b()
    words = ("resources=two_gpu", "learner=single", "sampler.adapters.max_served=4")
    whole = worker_memory(config(*words), shape, "learner").device[TRAINING]
    few = worker_memory(config(*words, "policy.quantisation=nf4"), shape, "learner").device[TRAINING]
    assert few["weights"] + few["quantised"] < 0.35 * whole["weights"]
