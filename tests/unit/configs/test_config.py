"""Configuration: groups and overrides compose in any order, and every mistake names its key and the next action."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.generate import configuration as document
from hypothesis import given, settings
from hypothesis import strategies as st

from mobula.configs import overrides as keys
from mobula.configs.errors import ConfigError
from mobula.configs.load import dump_config, load_config, load_resolved
from mobula.configs.overrides import FOLDER, groups, leaves, overridden, own_values
from mobula.configs.rules import RULES
from mobula.configs.rules.row import RuleRow
from mobula.configs.schema import DataKind, SamplerKind
from mobula.configs.schema.rewards import SHARED_SERVICE
from mobula.configs.schema.run import MAX_SECONDS

CRITIC = ("algorithm=ppo_gae",)
OWN_RANKS = (*CRITIC, "algorithm.critic.place=own_ranks")
SHARING = ("resources.learner.num_workers=2", "learner.sequence_parallel=2")
TWO_RANKS = ("learner=single", "resources.learner.num_workers=1", "resources.critic.num_workers=2")
ROWS = ("algorithm.supervised.path=x", "algorithm.supervised.coef=1")
CHAT = ("data=chat", "data.path=x")
TEACHER = ("algorithm=distill", "algorithm.distillation.teacher=some/model")
KL = ["algorithm.kl={coef: 0.1}", "algorithm.kl.coef=0.2"]
SPLIT_ENGINES = ("tensor_parallel=2", "num_gpus=2", "num_workers=4")
# Overrides, and what the message must name: the key, the value or the reason, and what to do.
MISTAKES: list[tuple[list[str], list[str]]] = [
    # keys that are not there
    (["algorithm.kl.coeff=1"], ["algorithm.kl.coeff is unknown", "did you mean algorithm.kl.coef?"]),
    (["learning_rate=3"], ["learning_rate is a key of TRL", "set learner.learning_rate=VALUE"]),
    (["algoritm.prompts_per_step=4"], ["did you mean algorithm.prompts_per_step?"]),
    (["learner.lr=1"], ["learner.lr is a key of verl: set learner.learning_rate=VALUE"]),
    (["learner.xyz=1"], ["learner.xyz is unknown", "learner has backend, optimizer, optimizer_options"]),
    (["algorithm.kl={coef: 1, foo: 2}"], ["algorithm.kl.foo is unknown"]),
    (["rewards.components.0.wieght=1"], ["did you mean rewards.components.INDEX.weight?"]),
    (["hydra.run.dir=elsewhere"], ["hydra.run.dir is unknown"]),
    # options that are not there
    (["resources=latop"],
     ["resources is laptop", "(resources=? lists them)"]),
    (["sampler=sglang"], ["sampler=sglang is unknown", "huggingface, image_patches, image_tokens, vllm"]),
    (["resources=_base"], ["resources=_base is unknown"]),
    (["algorithm=null"], ["algorithm is ", "one of 25 others", "algorithm.KEY=VALUE"]),
    # values of the wrong kind
    (["algorithm.kl.coef=abc"], ['algorithm.kl.coef got "abc"', "a number, at least 0", "set algorithm.kl.coef=VALUE"]),
    (["algorithm.kl.coef=-1"], ["algorithm.kl.coef got -1", "at least 0"]),
    (["learner.learning_rate=nan"], ["learner.learning_rate got NaN", "more than 0"]),
    (["seed=true"], ["seed got true", "a whole number"]),
    (["timeouts.start_s=1e10"], ["timeouts.start_s got 10000000000", "more than 0, at most 2592000"]),
    (["num_steps=2.5"], ["num_steps got 2.5", "a whole number"]),
    (["num_steps=null"], ["num_steps got null"]),
    (["resume=Auto"], ['resume got "Auto"', "one of never, auto"]),
    (["name=a,b"], ['name got "a,b"']),
    (["policy.freeze=visual."], ["policy.freeze got", "a list"]),
    (["rewards.components.1.weight=a"], ["rewards.components.1.weight got"]),
    (["rewards.components.7.weight=1"], ["rewards.components.7.weight=1", "mobula show-config"]),
    (["policy.model="], ['policy.model got ""', "text, not empty", "set policy.model=VALUE"]),
    (["data.path=''"], ['data.path got ""', "a path, not empty"]),
    (["folder="], ['folder got ""', "a path, not empty"]),
    # values that are not there
    (["policy=hf"], ["policy.model is missing", "give policy.model=VALUE"]),
    (["data=jsonl"], ["data.path is missing", "expected a path"]),
    # texts that are no overrides
    (["seed"], ["'seed' is no override", "write seed=VALUE"]),
    (["rewards.components.1.options.pattern=a=b"], ["rewards.components.1.options.pattern=\"'a=b'\""]),
    (["learner.learning_rate=1,2"], ["holds several values", "learner.learning_rate is a number"]),
    (["policy.lora.target_modules=a,b"], ["write policy.lora.target_modules=[a,b]"]),
    (["sampler=vllm,huggingface"], ["sampler is one of flow, huggingface, image_patches, image_tokens, vllm"]),
    (["seed==1"], ["seed is a whole number"]),
    ([".seed=1"], ["write seed=1"]),
    (["seed = 5"], ["write seed=5"]),
    (["~seed=1"], ["every key keeps its place"]),
    (["seed=${nothing}"], ['seed got "${nothing}"', "a whole number"]),
    (["resources.object_store_bytes=1"], ["resources.object_store_bytes got 1", "at least 78643200"]),
    # sections that contradict each other
    (["name=latest"], ["name=latest is the link to the newest run", "give another name"]),
    (["supervision.backoff_s=9", "supervision.max_backoff_s=8"], ["supervision.backoff_s=9", "max_backoff_s=8"]),
    (["timeouts.rollout_s=150", "supervision.probe_timeout_s=100"],
     ["weight_sync.timeout_s=120", "probe_timeout_s=100 and timeouts.rollout_s=150 would", "timeout_s below 80"]),
    (["weight_sync.timeout_s=160"], ["for up to 200 s", "rollout_s=180", "weight_sync.timeout_s below 144"]),
    (["sampler.top_p=0.9"], ["sampler.top_p=0.9", "set sampler.top_k=64 beside it", "sampler=huggingface"]),
    (["sampler.min_p=0.1"], ["sampler.min_p=0.1", "set sampler.top_k=64 beside it", "sampler=huggingface"]),
    (["sampler.top_k=-1"], ["sampler.top_k got -1", "at least 0"]),
    (["sampler.stop_strings=['']"], ["sampler.stop_strings", "leave it out"]),
    (["sampler.max_tokens=1000"], ["1064", "set sampler.max_model_len=1064"]),
    (["sampler.vllm.max_num_batched_tokens=64"], ["sampler.vllm.max_num_batched_tokens=64", "128 or more"]),
    (["resources=one_gpu_colocated", "policy.lora.rank=8", "weight_sync.payload=adapters"],
     ["resources.sleep_level=2 discards", "set resources.sleep_level=1 or weight_sync.payload=weights"]),
    (["sampler=huggingface", "sampler.max_videos_per_prompt=1"], ["samples no prompts with videos", "sampler=vllm"]),
    (["data.huggingface.subset=hard"], ["is not read with data.kind=jsonl", "set data.kind=huggingface"]),
    (["data.mixture.temperature=2"], ["is not read with data.kind=jsonl", "set data.kind=mixture"]),
    (["reference.place=learner_ranks", "reference.scorers.quantisation=int8"],
     ["is not read with reference.place=learner_ranks", "set reference.place=scorers"]),
    (["data=environment", "environment=calculator", "data.media_path=x"], ["data.media_path=x is not read"]),
    ([*CHAT, "data.label=a"], ["data.label=a is not read with data.kind=chat: leave it empty"]),
    ([*CHAT, "data.splits={validation: test}"], ["data.splits={'validation': 'test'}", "leave it empty"]),
    (["data.min_pixels=60000"], ["data.min_pixels=60000", "data.max_pixels"]),
    (["algorithm.num_minibatches=33"], ["algorithm.num_minibatches=33", "algorithm.prompts_per_step=32"]),
    (["algorithm.samples_per_prompt=1"], ["algorithm.samples_per_prompt=1", "2 or more"]),
    (["algorithm.samples_per_prompt=1", "algorithm.advantage=reinforce", "algorithm.drop_uniform_groups=true"],
     ["set algorithm.drop_uniform_groups=false"]),
    (["algorithm=pass_at_k", "algorithm.pass_k=8"], ["algorithm.pass_k=8", "algorithm.samples_per_prompt=8"]),
    (["algorithm=gdpo", "algorithm.shaping.reward_clip=1"], ["algorithm.shaping.reward_clip", "turn"]),
    (["algorithm.advantage=reinforce_pp", "algorithm.shaping.whiten=true"], ["set algorithm.shaping.whiten=false"]),
    (["algorithm.advantage=reinforce_pp_baseline", "algorithm.samples_per_prompt=1"], ["2 or more"]),
    (["algorithm.correction=icepop"], ["algorithm.correction=icepop", "set algorithm.old_logprobs=recomputed"]),
    (["algorithm.old_logprobs=interpolated"], ["algorithm.max_staleness=0", "algorithm.max_staleness=1 or more"]),
    (["algorithm.corrections.icepop.low=6"], ["algorithm.corrections.icepop.low=6", "raise the other"]),
    (["algorithm.kl.controller=adaptive", "algorithm.kl.coef=0"], ["algorithm.kl.coef to where it starts"]),
    (["algorithm.kl.estimator=k1"], ["expected gradient of 0", "algorithm.kl.place=reward"]),
    (["algorithm.loss=reinforce", "algorithm.num_epochs=2"], ["algorithm.num_epochs=2", "algorithm.loss=cispo"]),
    (["algorithm.loss=reinforce", "algorithm.num_minibatches=4"],
     ["algorithm.num_minibatches=4", "algorithm.loss=cispo"]),
    (["algorithm.loss=reinforce", "algorithm.max_staleness=2"],
     ["algorithm.max_staleness=2", "algorithm.correction=tis_token"]),
    (["algorithm=reinforce_pp", "algorithm.samples_per_prompt=1", "algorithm.shaping.length_penalty=0.1"],
     ["algorithm.samples_per_prompt=1", "raise"]),
    ([*TEACHER, "algorithm.kl.coef=0.1"], ["algorithm.kl.coef=0.1", "set algorithm.kl.coef=0, or leave the teacher"]),
    ([*TEACHER, "resources.reference.num_workers=0"], ["teacher=some/model", "set resources.reference.num_workers=1"]),
    ([*TEACHER, "algorithm.drop_uniform_groups=true"], ["reward_weight=0", "set algorithm.drop_uniform_groups=false"]),
    (["algorithm.distillation.teachers={a: m}"], ["teachers={'a': 'm'}", "set algorithm.distillation.teacher=CHECK"]),
    (["algorithm=distill"], ["algorithm.distillation.coef=1", "give algorithm.distillation.teacher=CHECKPOINT"]),
    (["algorithm.distillation.teacher=m"], ["algorithm.distillation.teacher=m", "set algorithm.distillation.coef=1"]),
    (["algorithm.supervised.coef=1"], ["algorithm.supervised.coef=1", "set algorithm.supervised.path to a folder"]),
    (["algorithm.supervised.path=x"], ["algorithm.supervised.path=x", "set algorithm.supervised.coef to the weight"]),
    ([*ROWS, "algorithm.supervised.batch_size=1"], ["batch_size=1", "raise algorithm.supervised.batch_size"]),
    (["algorithm.advantage=gae"], ["algorithm.critic.place=none", "use algorithm=ppo_gae"]),
    (["algorithm.critic.place=learner_ranks"], ["algorithm.advantage=grpo", "set algorithm.advantage=gae"]),
    ([*OWN_RANKS, "resources.critic.num_workers=0"], ["resources.critic.num_workers is 0", "set it to 1 or more"]),
    ([*OWN_RANKS, "resources.critic.num_workers=999"], ["resources.critic.num_workers=999", "256 samples"]),
    ([*OWN_RANKS, *TWO_RANKS], ["set resources.critic.num_workers=1"]),
    ([*CRITIC, "algorithm.critic.warmup_steps=200"], ["algorithm.critic.warmup_steps=200", "num_steps=200", "lower"]),
    ([*CRITIC, "algorithm.critic.optimizer=muon", "learner=deepspeed"], ["set algorithm.critic.optimizer=adamw"]),
    ([*CRITIC, "algorithm.kl.coef=0", "algorithm.distillation.teacher=m", "algorithm.distillation.coef=1"],
     ["algorithm.distillation.reward_weight=0", "set algorithm.distillation.reward_weight=1"]),
    (["algorithm.losses.cpg.clip_low=1"], ["algorithm.losses.cpg.clip_low got 1", "less than 1"]),
    (["algorithm.loss=gppo"], ["algorithm.loss got", "one of gspo, gmpo, sapo or one of 8 others"]),
    (["learner=deepspeed", "learner.optimizer=adamw_8bit"], ["learner.optimizer=adamw_8bit", "use learner=fsdp2"]),
    (["learner=deepspeed", "learner.optimizer=muon"], ["learner.optimizer=muon", "use learner=fsdp2"]),
    (["algorithm.gamma=0"], ["algorithm.gamma got 0", "more than 0, at most 1"]),
    (["resources.learner.num_workers=999"], ["resources.learner.num_workers=999", "256 samples"]),
    (["learner=single"], ["learner.backend=single", "learner=fsdp2"]),
    (["learner=deepspeed", "resources.learner.replicas=2"], ["learner.backend=deepspeed", "learner=fsdp2"]),
    (["resources.learner.num_workers=3", "resources.learner.replicas=2"], ["does not divide", "a multiple"]),
    (["learner.sequence_parallel=3"],
     ["learner.sequence_parallel=3", "resources.learner.num_workers as a multiple of 3"]),
    (["learner=single", "learner.sequence_parallel=2"], ["but learner.backend=single", "learner=fsdp2"]),
    ([*SHARING, "policy.attention=eager"], ["learner.sequence_parallel=2", "policy.attention=eager", "sdpa"]),
    ([*SHARING, "resources.learner.replicas=2"], ["the 1 ranks of resources.learner", "as a multiple of 4"]),
    (["reference.scorers.quantisation=int4"],
     ["reference.scorers.quantisation=int4", "set reference.scorers.quantisation=int8"]),
    (["reference.scorers.quantisation=int8", "algorithm.kl.coef=0"],
     ["nothing reads a reference", "quantisation=none"]),
    (["resources.reference.num_workers=0"], ["algorithm.kl.coef=0.01", "resources.reference.num_workers=1"]),
    (["resources.rollout.num_workers=0"], ["resources.rollout.num_workers is 0", "1 or more"]),
    (["resources.transport=nccl"], ["resources.transport=nccl", "set resources.transport=gloo"]),
    (["resources.rollout.num_gpus=1"], ["resources.rollout.num_gpus=1", "resources=two_gpu"]),
    (["resources=two_gpu", "resources.reference.num_gpus=0"], ["resources.reference.num_gpus=0", "device=cpu"]),
    (["resources=two_gpu", "resources.rollout.num_gpus=0.5"], ["NCCL", "resources.rollout.num_gpus=1"]),
    (["resources=two_gpu", "resources.learner.num_gpus=1.5"], ["resources.learner.num_gpus=1 or 2"]),
    (["policy.attention=flash_attention_2"], ["set policy.attention=sdpa"]),
    (["rewards.components.1.name=accuracy"], ["accuracy more than once", "rewards.components.INDEX.name"]),
    (["rewards.accuracy_component=exact"], ["rewards.accuracy_component=exact", "one of accuracy, format"]),
    (["rewards.components=[]"], ["every reward is 0", "rewards=math_answer"]),
    (["warm_start.target_accuracy=0"], ["warm_start.target_accuracy=0", "warm_start=none"]),
    # engines on several GPUs
    (["resources=eight_gpu_colocated", *(f"resources.rollout.{key}" for key in SPLIT_ENGINES)],
     ["books whole GPUs, of which resources.colocated=true has none left"]),
    (["resources=laptop", "resources.rollout.tensor_parallel=2"], ["needs vLLM on GPUs, got sampler.kind=vllm"]),
    (["resources=eight_gpu_split", "sampler=huggingface", "resources.rollout.tensor_parallel=2"],
     ["needs vLLM on GPUs, got sampler.kind=huggingface"]),
    (["resources=eight_gpu_split", "resources.rollout.tensor_parallel=4"],
     ["resources.rollout.num_gpus=1: set resources.rollout.num_gpus=4"]),
    # ways of being asynchronous that exclude each other
    (["algorithm.stragglers=overtake"], ["algorithm.max_staleness=0 admits none"]),
    (["resources=laptop_colocated", "algorithm.max_staleness=1"], ["set algorithm.max_staleness=0, or a preset"]),
    (["resources=laptop_colocated", "learner=deepspeed"], ["use learner=fsdp2"]),
    # overrides that are not in the result
    (["seed=1", "seed=2"], ["seed=1 and seed=2 contradict each other"]),
    (["experiment=digit_sum"], ["experiment=digits and experiment=digit_sum contradict each other"]),
    (KL, [f"{KL[0]} changes nothing, it is overruled by {KL[1]}"]),
    (KL[::-1], [f"{KL[0]} changes nothing, it is overruled by {KL[1]}"]),
    (["learner=deepspeed", "learner.backend=fsdp2"],
     ["learner=deepspeed changes nothing, it is overruled by learner.backend=fsdp2"]),
    (["warm_start.num_steps=5", "warm_start=none"],
     ["warm_start=none changes nothing, it is overruled by warm_start.num_steps=5"]),
    # sections of other kinds
    (["sampler=huggingface", "sampler.vllm.kv_cache_bytes=1"],
     ["sampler.vllm.kv_cache_bytes=1 is not read with sampler.kind=huggingface: ", "set sampler.kind=vllm"]),
    (["sampler.flow.height=8"], ["is not read with sampler.kind=vllm: leave it out, or set sampler.kind=flow"]),
    (["offline.dpo.beta=0.2"], ["is not read with offline.job=none: leave it out, or set offline.job=dpo"]),
    (["offline={job: sft, dpo: {beta: 0.2}}"], ["is not read with offline.job=sft"]),
    (["sampler.kv_cache_bytes=1"], ["did you mean sampler.vllm.kv_cache_bytes"]),
    (["sampler.block_size=16"], ["did you mean sampler.vllm.block_size"]),
    # a guard that cannot act
    (["guard.limits.length=0.5"], ["guard.limits.length=0.5 is a ratio"]),
    (["rewards=exact_match", "guard.limits.format=0.2"], ["no component has the function format"]),
    (["guard.limits.length=2", "guard.action=raise_kl", "algorithm.kl.coef=0"],
     ["guard raises the KL coefficient for length, but algorithm.kl.coef=0"]),
    (["guard.limits.length=2", "guard.actions.length=rollback", "checkpoints.interval_steps=0"],
     ["guard rolls back for length, but checkpoints.interval_steps=0"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "parts"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_mistake_names_its_key_and_the_next_action(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["experiment=digits", *overrides])
    for words in parts:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=digits", "algorithm.num_minibatches=32", "algorithm.samples_per_prompt=2"], "holds 2 samples"),
        (["experiment=digits", *ROWS, "algorithm.supervised.batch_size=2"], "algorithm.supervised.batch_size=2 leaves"),
        (["experiment=sft", "policy.model=x", "data.path=x", "offline.batch_size=2"], "offline.batch_size=2 leaves"),
    ],
)
def test_a_minibatch_has_a_row_for_each_group_of_ranks_that_share_rows(overrides: list[str], message: str) -> None:
    four = [*overrides, "resources=laptop", "learner=fsdp2", "resources.learner.num_workers=4"]
    with pytest.raises(ConfigError, match=message):
        load_config(four)
    load_config([*four, "learner.sequence_parallel=2"])


def test_every_time_of_a_run_is_bounded() -> None:
    bounded = {name: key.expected for name, key in keys.known_keys().items() if name.endswith("_s")}
    assert len(bounded) >= 20
    assert [name for name, expected in bounded.items() if "at most" not in expected] == []
    assert load_config(["experiment=digits", "timeouts.start_s=2592000"]).timeouts.start_s == MAX_SECONDS


def test_every_contradiction_is_named_at_once() -> None:
    words = ["sampler.top_p=0.5", "resources.rollout.num_workers=0", "rewards.accuracy_component=x"]
    with pytest.raises(ConfigError) as caught:
        load_config(["experiment=digits", *words])
    assert len(str(caught.value).splitlines()) == 3


def test_any_folder_comes_in_as_data_of_any_experiment() -> None:
    for experiment in ("digits", "digit_sum", "digits_lora"):
        config = load_config([f"experiment={experiment}", "data=jsonl", "data.path=/some/My Folder"])
        assert (config.data.kind, config.data.path) == (DataKind.JSONL, Path("/some/My Folder"))


def has_path(option: str) -> bool:
    return "path" in own_values("data", option)["data"]


MODEL, FOLDER_OF_DATA = "policy.model=some/model", "data.path=some/folder"
NEEDS: dict[str, list[str]] = {
    "sampler=flow": ["warm_start.num_steps=0", "resources.reference.num_workers=0", "algorithm.kl.coef=0"],
    "sampler=image_patches": ["resources.reference.num_workers=0", "algorithm.kl.coef=0"],
    "sampler=image_tokens": ["warm_start=none", "algorithm.kl.coef=0", "resources.reference.num_workers=0"],
    **{f"environment={option}": ["data=environment"] for option in groups()["environment"] if option != "none"},
    "policy=hf": [MODEL],
    **{f"data={option}": [FOLDER_OF_DATA] for option in groups()["data"] if not has_path(option)},
    "data=environment": ["environment=calculator"],
    "data=mixture": ["data.mixture.sources={one: {kind: jsonl, path: a, weight: 1.0}}"],
    "data=chat": ["experiment=sft", MODEL, FOLDER_OF_DATA],
    **{f"data={option}": ["experiment=sft_digits"] for option in ("digit_pairs", "digit_sum_pairs", "digit_labels")},
    "learner=single": ["resources.learner.num_workers=1"],
    "algorithm=distill": ["algorithm.distillation.teacher=some/model"],
    "algorithm=diffusion_nft": ["experiment=glyphs_nft"],
    **{f"algorithm={name}": ["experiment=glyphs_grpo"] for name in ("grpo_guard", "dance_grpo", "flow_grpo_wan")},
    "experiment=sd3_5_ocr_grpo": [FOLDER_OF_DATA],
    **{f"experiment={name}": [MODEL, FOLDER_OF_DATA] for name in ("own", "sft", "reward_model", "dpo", "kto")},
    "rewards=own": ["rewards.components.0.function=mine:score"],
}


def value_at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("choice", [f"{group}={option}" for group, options in groups().items() for option in options])
def test_every_option_of_every_group_loads(choice: str) -> None:
    config = load_config(overridden(["experiment=digits"], [choice, *NEEDS.get(choice, [])]))
    group, _, option = choice.partition("=")
    values = json.loads(config.model_dump_json())
    for name, value in leaves(own_values(group, option)):
        is_computed = isinstance(value, str) and value.startswith("${")  # tests of presets check its value
        is_asked_for = any(word.startswith(f"{name}.") for word in NEEDS.get(choice, []))
        assert is_computed or is_asked_for or holds(value_at(values, name), value)


def holds(loaded: Any, stated: Any) -> bool:
    """Whether a loaded value is the stated one; what a file does not state of a list's entries is a default."""
    if isinstance(stated, dict) and isinstance(loaded, dict):
        return all(holds(loaded.get(key), value) for key, value in stated.items())
    if isinstance(stated, list) and isinstance(loaded, list):
        return len(loaded) == len(stated) and all(map(holds, loaded, stated))
    return bool(loaded == stated)


RECIPES = groups()["algorithm"]
FLOW_RECIPES = ("dance_grpo", "diffusion_nft", "flow_grpo", "flow_grpo_fast", "flow_grpo_wan", "grpo_guard")


@pytest.mark.parametrize("name", RECIPES)
def test_an_algorithm_preset_states_its_whole_recipe(name: str) -> None:
    values = own_values("algorithm", name)["algorithm"]
    needed = {"advantage", "loss", "loss_aggregation", "old_logprobs", "correction", "kl"}
    assert needed <= values.keys()
    assert {"coef", "controller"} <= values["kl"].keys()
    assert values["kl"]["coef"] == 0 or {"estimator", "place"} <= values["kl"].keys()
    assert values["loss"] == "reinforce" or values["loss"] in values["losses"]


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FLOW_RECIPES])
def test_an_algorithm_is_the_same_recipe_for_every_experiment(name: str) -> None:
    words = [f"algorithm={name}", *NEEDS.get(f"algorithm={name}", [])]
    sizes = ("prompts_per_step", "samples_per_prompt", "max_concurrent_groups", "loss_norm", "critic")
    digits, maze, geometry = (
        load_config([f"experiment={task}", "resources=laptop", *words]).algorithm.model_dump(exclude=set(sizes))
        for task in ("digits", "calculator", "geometry3k")
    )
    assert digits == maze == geometry


def test_dr_grpo_divides_by_the_longest_response() -> None:
    for words, longest in ([], 8), (["sampler.max_tokens=16"], 16):
        assert load_config(["experiment=digits", "algorithm=dr_grpo", *words]).algorithm.loss_norm == longest
    assert load_config(["experiment=geometry3k", "algorithm=dr_grpo"]).algorithm.loss_norm == 2048


def test_a_key_of_another_trainer_is_answered_with_the_key_of_this_one() -> None:
    for translation in keys.translations():
        assert keys.find(translation.ours) is not None, translation.ours
        for trainer, names in translation.theirs.items():
            for name in names:
                assert keys.find(name) is None, f"{name} is a key of this configuration"
                answers = [t.ours for t in keys.translations() if name in t.theirs.get(trainer, ())]
                assert answers == [translation.ours], f"{name} of {trainer} has one meaning"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *[(name, "algorithm.kl.coef") for name in ("beta", "actor_rollout_ref.actor.kl_loss_coef")],
        *[(name, "algorithm.kl.coef") for name in ("actor.kl_loss_coef", "init_kl_coef")],
        *[(name, "algorithm.samples_per_prompt") for name in ("num_generations", "rollout.n")],
        *[(name, "learner.learning_rate") for name in ("lr", "learner.lr")],
        ("critic.optim.lr", "algorithm.critic.learning_rate"),
        ("micro_train_batch_size", "learner.tokens_per_microbatch"),
        ("config.train.clip_range", "algorithm.losses.ppo_clip.clip_low"),
        *[(name, "sampler.max_tokens") for name in ("rollout.max_tokens", "sampler.max_tokns", "max_tokens")],
        ("model.lora.rank", "policy.lora.rank"),
        ("trainer.warmup_steps", "learner.warmup_steps"),
    ],
)
def test_an_unknown_key_finds_its_meaning(name: str, ours: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(["experiment=digits", f"{name}=1"])
    assert f"set {ours}=VALUE" in str(raised.value) or f"did you mean {ours}?" in str(raised.value)


def test_mayes_preset_has_seven_learner_ranks_an_engine_and_its_evaluation() -> None:
    config = load_config(["experiment=maye"])
    assert (config.resources.learner.num_workers, config.resources.rollout.num_workers) == (7, 1)
    assert config.policy.freeze == ("vision",) and set(config.evaluation.suites) == set(
        load_config(["experiment=digits", "evaluation=maye"]).evaluation.suites
    )
    assert (config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt) == (7 * 128, 1)
    assert (config.algorithm.kl.coef, config.algorithm.kl.place) == (0.001, "loss")


@pytest.mark.parametrize("name", ["sft_llava", "reward_model_rlaif_v", "dpo_rlaif_v"])
def test_an_offline_preset_for_gpus_is_short_and_names_its_checkpoint_and_data(name: str) -> None:
    path = document.TARGET.parent.parent / "configs" / "experiment" / f"{name}.yaml"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 25
    config = load_config([f"experiment={name}"])
    assert name.startswith(config.offline.job) and config.policy.model.startswith("Qwen/")
    folder = name.removeprefix(f"{config.offline.job}_")
    assert config.resources.device == "cuda" and config.data.path == Path("data") / folder


FLOW = ("experiment=glyphs_grpo",)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["algorithm=dapo"], {"losses.ppo_clip.clip_low": 0.2, "losses.ppo_clip.clip_high": 0.28, "kl.coef": 0}),
        (["algorithm=dapo"], {"loss_aggregation": "token_mean", "drop_uniform_groups": True, "overlong_filter": True}),
        (["algorithm=gspo"], {"losses.gspo.clip_low": 3e-4, "losses.gspo.clip_high": 4e-4}),
        (["algorithm=gspo"], {"loss": "gspo", "loss_aggregation": "sequence_mean"}),
        (["algorithm=dr_grpo"], {"loss_aggregation": "sequence_sum_token_norm"}),
        (["algorithm=ppo_gae"], {"advantage": "gae", "gae_lambda": 0.95, "gamma": 1.0, "critic.value_clip": 0.2}),
        (["algorithm=ppo_gae"], {"losses.ppo_clip.clip_low": 0.2, "losses.ppo_clip.clip_high": 0.2}),
        (["algorithm=ppo_gae"], {"loss": "ppo_clip", "critic.place": "learner_ranks", "shaping.whiten": True}),
        ([*FLOW, "algorithm=flow_grpo"], {"losses.ppo_clip.clip_low": 1e-4, "losses.ppo_clip.clip_high": 1e-4}),
        ([*FLOW, "algorithm=flow_grpo_fast"], {"losses.ppo_clip.clip_low": 1e-5, "losses.ppo_clip.clip_high": 1e-5}),
        ([*FLOW, "algorithm=flow_grpo_wan"], {"losses.ppo_clip.clip_low": 1e-3, "losses.ppo_clip.clip_high": 1e-3}),
        ([*FLOW, "algorithm=dance_grpo"], {"losses.ppo_clip.clip_low": 1e-4, "losses.ppo_clip.clip_high": 1e-4}),
        ([*FLOW, "algorithm=grpo_guard"], {"losses.grpo_guard.clip_low": 2e-6, "losses.grpo_guard.clip_high": 2e-6}),
        (["experiment=glyphs_nft"], {"losses.nft.beta": 1.0, "losses.nft.max_advantage": 5.0}),
    ],
)
def test_presets_state_the_values_of_their_papers(words: list[str], values: dict[str, Any]) -> None:
    found = load_config(overridden(["experiment=digits"], words)).algorithm.model_dump(mode="json")
    assert {name: value_at(found, name) for name in values} == values


def test_presets_of_images_state_the_values_of_their_papers() -> None:
    for name, flow in {"flow_grpo_wan": ("sde", 0.7), "dance_grpo": ("dance", 0.3)}.items():
        found = load_config([*FLOW, f"algorithm={name}"]).sampler.flow
        assert (found.kernel, found.noise_level) == flow
    cps = load_config([*FLOW, "algorithm=dance_grpo", "sampler.flow.kernel=cps"])
    assert cps.sampler.flow.kernel == "cps", "a key on the command line is stronger"
    vrl = load_config(["experiment=sd3_5_ocr_grpo", "data.path=some/folder"])
    rl = vrl.algorithm
    assert (rl.losses.ppo_clip.clip_low, rl.kl.coef, rl.shaping.advantage_clip) == (1e-4, 0.04, 5.0)
    assert (vrl.policy.lora.rank, vrl.policy.lora.alpha, vrl.learner.learning_rate) == (32, 64.0, 3e-4)
    assert vrl.data.prompt_suffix == "", "the text encoder reads the prompt alone"


def test_a_critic_goes_where_its_algorithm_goes() -> None:
    """`algorithm=grpo` on the command line takes the critic and the KL of the experiment away with its advantage."""
    chosen = load_config(["experiment=pixel_maze_ppo", "algorithm=grpo"]).algorithm
    assert chosen.advantage == "grpo" and not chosen.critic.is_on
    assert (chosen.kl.coef, chosen.kl.controller, chosen.kl.place) == (0.04, "fixed", "loss")
    one = load_config(["experiment=digits", "algorithm=ppo_gae", "algorithm.samples_per_prompt=1"])
    assert one.algorithm.samples_per_prompt == 1, "values take the place of siblings"


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_named_on_the_command_line_wins_over_the_experiment(order: int) -> None:
    words = ["experiment=digits", "warm_start=none", "learner=deepspeed", "algorithm=rloo", "sampler=huggingface"]
    config, digits = load_config(words[::order]), load_config(["experiment=digits"])
    assert config.warm_start == digits.warm_start.model_copy(update={"num_steps": 0})
    assert config.learner == digits.learner.model_copy(update={"backend": "deepspeed"})
    assert (config.algorithm.advantage, config.algorithm.loss, config.algorithm.kl.coef) == ("rloo", "reinforce", 0.03)
    assert config.sampler == digits.sampler.model_copy(update={"kind": SamplerKind.HUGGINGFACE})
    key = load_config(["warm_start.learning_rate=0.5", *words][::order])
    assert (key.warm_start.num_steps, key.warm_start.learning_rate) == (0, 0.5)


def test_a_preset_on_the_command_line_wins_over_the_experiment_with_all_that_it_builds_on() -> None:
    named = ["experiment=own", "policy.model=m", "data.path=d"]
    own, gpu_2, gpu_1 = (load_config([*named, *more]) for more in ([], ["resources=two_gpu"], ["resources=gpu_1"]))
    sizes = [config.sampler.vllm.kv_cache_bytes for config in (own, gpu_2, gpu_1)]
    assert sizes == [2**30, 0, 0], "of the GPU"
    assert (gpu_1.name, gpu_1.learner.warmup_steps) == ("own", own.learner.warmup_steps)


def test_own_has_lengths_and_passes_that_fit_the_device() -> None:
    named = ["experiment=own", "policy.model=m", "data.path=d"]
    cpu, gpu = load_config(named), load_config([*named, "resources=gpu_1"])
    assert (cpu.sampler.max_tokens, cpu.sampler.max_model_len, cpu.learner.tokens_per_microbatch) == (256, 1280, 2048)
    assert (gpu.sampler.max_tokens, gpu.sampler.max_model_len, gpu.learner.tokens_per_microbatch) == (1024, 3072, 8192)
    without = [f"resources.{role}.num_gpus=0" for role in ("rollout", "learner", "reference")]
    sizes = ["sampler.vllm.kv_cache_bytes=268435456", "sampler.vllm.max_num_seqs=16"]
    on_cpu = load_config([*named, "resources=gpu_1", "resources.device=cpu", *without, *sizes])
    assert on_cpu.sampler.max_tokens == 256, "the word is computed with"
    assert load_config([*named, "sampler.max_tokens=200"]).sampler.max_tokens == 200


def test_a_word_given_twice_or_equal_to_the_default_stands() -> None:
    words = ["learner=fsdp2", "learner.backend=fsdp2", "seed=0", "seed=0", "experiment=digits"]
    assert load_config(["experiment=digits", *words]) == load_config(["experiment=digits"])


@pytest.mark.parametrize("words", [[], ["learner=single", "resources.learner.num_workers=1"]])
def test_without_an_experiment_model_and_data_are_asked_for(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    message = str(caught.value)
    for part in ("policy.model is missing", "data.path is missing", "`experiment=own", "`experiment=digits`"):
        assert part in message
    config = load_config([*words, "policy.model=m", "data.path=d"])
    assert (config.warm_start.num_steps, config.policy.tiny, config.data.kind) == (0, "none", DataKind.JSONL)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("runs of mine/Übung, zwei=2", "runs of mine/Übung, zwei=2"),
        ("a:b{c}[d] $e", "a:b{c}[d] $e"),
        ("'in quotes'", "in quotes"),
        ('"both \'s"', "both 's"),
        ("'a','b'", "'a','b'"),
        ("2024", "2024"),
        ("1e5", "1e5"),
        ("true", "true"),
        ("${x}", "${x}"),
        ("b~/c", "b~/c"),
        ("~/models/x", str(Path.home() / "models" / "x")),
    ],
)
def test_a_value_is_text_where_text_or_a_path_is_expected(tmp_path: Path, value: str, expected: str) -> None:
    config = load_config(["experiment=digits", f"policy.model={value}", f"data.path={value}"])
    assert (config.policy.model, config.data.path) == (expected, Path(expected))
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    again = load_resolved(path, [f"policy.model={value}", "data.prompt_suffix= Sag's, \\boxed{}!"])
    assert (again.policy.model, again.data.prompt_suffix) == (expected, " Sag's, \\boxed{}!")


@pytest.mark.parametrize("preset", ["laptop", "two_gpu", "eight_gpu_colocated"])
def test_a_clip_below_rounding_is_around_the_learners_own_policy(preset: str) -> None:
    algorithm = load_config(["experiment=digits", "algorithm=gspo", f"resources={preset}"]).algorithm
    expected = ("engine", "none") if preset == "laptop" else ("recomputed", "tis_token")
    assert (algorithm.old_logprobs, algorithm.correction) == expected
    plain = load_config(["experiment=digits", "algorithm=grpo", f"resources={preset}"]).algorithm
    assert (plain.old_logprobs, plain.correction) == ("engine", "none")


def test_gpu_presets_bring_their_engine_settings_with_them() -> None:
    laptop, gpus = load_config(["experiment=digits"]), load_config(["experiment=digits", "resources=eight_gpu_split"])
    assert (gpus.resources.transport, gpus.resources.dtype) == ("nccl", "bfloat16")
    assert gpus.sampler.vllm.kv_cache_bytes == gpus.sampler.vllm.max_num_seqs == 0 < laptop.sampler.vllm.kv_cache_bytes
    assert gpus.weight_sync.bucket_bytes > laptop.weight_sync.bucket_bytes


def test_open_options_take_new_keys_and_lists_keep_their_other_items() -> None:
    words = ["rewards.components.1.options.strict=true", "rewards.components.1.weight=0.5"]
    config = load_config(["experiment=digits", *words])
    accuracy, form = config.rewards.components
    assert (accuracy.name, accuracy.weight) == ("accuracy", 1.0)
    assert (form.name, form.weight, form.options["strict"]) == ("format", 0.5, True)


@settings(max_examples=25, deadline=None)
@given(
    learning_rate=st.floats(min_value=1e-300, max_value=1e300),
    suffix=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    seed=st.integers(min_value=0, max_value=2**32 - 1),
)
def test_dumped_config_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, learning_rate: float, suffix: str, seed: int
) -> None:
    config = load_config(["experiment=digits", "policy.freeze=[visual.]"])
    config = config.model_copy(
        update={
            "seed": seed,
            "learner": config.learner.model_copy(update={"learning_rate": learning_rate}),
            "data": config.data.model_copy(update={"prompt_suffix": suffix}),
        }
    )
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_resolved(path) == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"- a\n- b\n", "expected a mapping"),
        (b"a: [\n", "is no YAML"),
        (b"\xff\xfe\x00", "is no YAML"),
        (b"seed: 1\n", "policy is missing"),
    ],
)
def test_unusable_resolved_file_is_a_config_error(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_resolved(path)


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(["experiment=digits"]).seed = 3


def test_the_root_file_repeats_no_default_of_the_schema() -> None:
    values = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))
    values.pop("defaults")
    assert all(str(value).startswith("${") for _, value in leaves(values))


def test_entries_of_lists_and_mappings_are_written_with_what_differs() -> None:
    component = "{name: accuracy, function: exact_match, weight: 1.0}"
    rewards = [f"rewards.components=[{component}]", "rewards.recipes={default: {components: [accuracy]}}"]
    data = ["data=mixture", "data.mixture.sources={a: {kind: jsonl, path: a, weight: 1.0}}", "data.path=x"]
    config = load_config(["experiment=digits", *rewards, *data])
    only = config.rewards.components[0]
    assert (only.service, only.options, only.retries, only.needs_images) == (SHARED_SERVICE, {}, 0, False)
    assert config.data.mixture.sources["a"].row_format == config.data.row_format == "question"
    assert keys.known_keys()["rewards.components.INDEX.service"].default == SHARED_SERVICE


def test_every_key_is_documented() -> None:
    assert [key.name for key in keys.known_keys().values() if not key.description] == []


@pytest.mark.parametrize(
    ("page", "current"),
    [
        (document.COMING_FROM, document.with_key_maps),
        (document.RECIPES_PAGE, document.with_recipes),
    ],
)
def test_committed_documentation_is_the_generated_one(page: Path, current: Callable[[str], str]) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == current(text), "run `python -m docs.generate.configuration`"


def test_each_group_has_a_page_and_all_are_the_generated_ones() -> None:
    written = document.pages()
    assert {path.stem for path in written} == {"configuration", "run", *keys.groups()}
    there = {path: path.read_text(encoding="utf-8") for path in (document.TARGET, *document.PAGES.glob("*.md"))}
    assert there == written, "run `python -m docs.generate.configuration`"
    shown = "".join(there.values())
    names = {key.name.removesuffix("_options") for key in keys.known_keys().values() if "." not in key.name}
    assert [name for name in names if f"| `{name}`" not in shown and f"Keys of `{name}`" not in shown] == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner=single", "set single keys, as learner.KEY=VALUE"),
        ("algorithm.kl.coeff=1", "did you mean algorithm.kl.coef?"),
        ("algorithm.kl.coef=a", 'algorithm.kl.coef got "a"'),
        ("rewards.components.7.weight=1", "rewards.components.7.weight=1: a value cannot be set there"),
    ],
)
def test_over_a_runs_own_configuration_only_single_keys_can_be_set(tmp_path: Path, override: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(load_config(["experiment=digits"])), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_resolved(path, [override])
    own = ["algorithm.kl.coef=0.5", "seed=9"]
    assert load_resolved(path, own) == load_config(["experiment=digits", *own])


def test_rows_of_rules_name_keys_of_the_configuration() -> None:
    config = load_config(["experiment=digits", "algorithm.losses.nft.max_decay=0.5"])
    algorithm = config.algorithm.model_copy(update={"loss": "nft"})  # a row names its slow copy
    config = config.model_copy(update={"algorithm": algorithm})
    for row in RULES:
        assert not isinstance(row, RuleRow) or row.message.format_map(dict(config))
