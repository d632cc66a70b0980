"""Checkpoints: what is stored, what is pushed, and what is written."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from learner_data import random_groups, tiny_config
from loaded_ranks import LORA, load_all
from one_learner import connected_learner
from safetensors.torch import load_file, save, save_file
from scored_rows import collated
from tiny_checkpoints import families, write_text_policy
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from mobula.cluster.errors import PreflightError
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import prepare
from mobula.learner.backends.native import SingleBackend
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.checkpoint import (
    StoredModel,
    broken_ties,
    load_policy_model,
    loaded_tensors,
    pushed_manifest,
    pushed_tensors,
    save_policy,
    stored_model,
    write_weights,
)
from mobula.learner.policies.families import unequal_window
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import (
    RANDOM_PARTS,
    PatchProduct,
    checkpoint_names,
    load_model,
    multiply_patches,
)
from mobula.learner.policies.tiny import TINY, write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policies.trained import as_policy, unread_trained_model
from mobula.learner.policy_weights import PolicyWeights

State = dict[str, Tensor]
HEAD, EMBEDDING, NORM, WEIGHTS = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.safetensors"


def rewritten(folder: Path, change: Callable[[State], State]) -> Path:
    """The checkpoint, whose tensors are changed."""
    state = {name: tensor.contiguous().clone() for name, tensor in change(load_file(folder / WEIGHTS)).items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def edited(folder: Path, **values: Any) -> Path:
    """The checkpoint with other values in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def check_equal(folder: Path) -> StoredModel:
    """Names, shapes and tensors are those that transformers loads."""
    model = load_model(str(folder), torch.float32, "sdpa")
    own = model.state_dict()
    expected = {pushed: own[state_name] for state_name, pushed in checkpoint_names(model).items()}
    stored, found = stored_model(folder), dict(pushed_tensors(folder))
    assert {spec.name: spec.shape for spec in stored.manifest.tensors} == {n: t.shape for n, t in expected.items()}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert not (stored.missing or stored.misshapen)
    return stored


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", families(name for name in TINY if name != "qwen3-vl-moe"))  # stored transposed
def test_a_saved_model_has_the_names_and_tensors_of_a_push(tmp_path: Path, name: str, tied: bool) -> None:
    write_tiny(name, tmp_path, tie_word_embeddings=tied)
    stored = check_equal(rewritten(tmp_path, lambda state: state))
    assert not stored.left_out
    assert set(stored.names) == set(stored.tensors)


def renamed(name_of: Callable[[str], str]) -> Callable[[State], State]:
    return lambda state: {name_of(name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("kept", [EMBEDDING, HEAD])
def test_an_engine_gets_both_sides_of_a_tie_whichever_the_files_have(tmp_path: Path, kept: str) -> None:
    write_tiny("llama", tmp_path, tie_word_embeddings=True)
    expected = load_file(tmp_path / WEIGHTS)
    found = dict(loaded_tensors(rewritten(tmp_path, renamed(lambda name: kept if name == EMBEDDING else name))))
    assert found.keys() == {*expected, HEAD}
    assert torch.equal(found[HEAD], expected[EMBEDDING]) and torch.equal(found[EMBEDDING], expected[EMBEDDING])


def of_transformers_5(name: str) -> str:
    return f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.")


SPARE = {
    "inv_freq of every layer": ("llama", False, {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(16)}),
    "a head for several tokens": ("qwen3.5", False, {"mtp.fc.weight": torch.ones(128, 256)}),
    "position ids": ("llava", False, {"vision_tower.vision_model.embeddings.position_ids": torch.arange(9)[None]}),
}
OTHER_FILES: dict[str, tuple[str, bool, Callable[[State], State]]] = {
    "both sides of a tie": ("llama", True, lambda state: state | {HEAD: state[EMBEDDING]}),
    "both sides of a tie, vision": ("qwen2.5-vl", True, lambda state: state | {HEAD: state[EMBEDDING]}),
    "the other side of a tie": ("llama", True, renamed(lambda name: HEAD if name == EMBEDDING else name)),
    "a base model without its prefix": ("llama", True, renamed(lambda name: name.removeprefix("model."))),
    "the names of transformers 5": ("qwen2.5-vl", False, renamed(of_transformers_5)),
} | {kind: (name, tied, lambda state, more=more: state | more) for kind, (name, tied, more) in SPARE.items()}


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_spare_tensors_and_other_names_are_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    name, tied, change = OTHER_FILES[kind]
    write_tiny(name, tmp_path, tie_word_embeddings=tied)
    assert not check_equal(rewritten(tmp_path, change)).left_out


def test_tensors_that_are_missing_misshapen_or_unknown_are_named(tmp_path: Path) -> None:
    def spoilt(state: State) -> State:
        del state[HEAD]
        return state | {NORM: torch.ones(7), "model.layers.2.mlp.up_proj.weight": torch.ones(2)}

    stored = stored_model(rewritten(write_tiny("llama", tmp_path), spoilt))
    assert stored.missing == (HEAD,)
    assert stored.misshapen == ("model.norm.weight is [7], [128] by config.json",)
    assert stored.left_out == ("model.layers.2.mlp.up_proj.weight",)


def test_a_tie_whose_sides_differ_is_found(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path, tie_word_embeddings=True)
    for factor, broken in ((1, []), (2, [(HEAD, EMBEDDING)])):
        rewritten(tmp_path, lambda state, factor=factor: state | {HEAD: state[EMBEDDING] * factor})
        assert broken_ties(tmp_path, stored_model(tmp_path)) == broken


@pytest.mark.parametrize("sides", [(2, 4, 4), (4, 8, 4)])
def test_patches_are_multiplied_as_they_are_convolved(sides: tuple[int, ...]) -> None:
    """Also an input that is larger than the kernel."""
    convolution = nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4))
    models = convolution, deepcopy(convolution)
    multiply_patches(models[1])
    assert type(models[1]) is PatchProduct
    patches = torch.randn(5, 3, *sides)
    expected, found = (model(patches) for model in models)
    torch.testing.assert_close(found, expected)
    for output in (expected, found):
        output.square().sum().backward()
    for own, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


SHARED = {
    "qwen2.5-vl": (),
    "qwen3-vl-moe": ("policy.freeze=[router]",),
    "qwen2.5-omni": (LORA,),
    "gemma3": ("policy.freeze=[vision]",),
    "llama": (LORA,),
}
"""Families that two ranks load: windows and grids, transposed experts, a part of a checkpoint, tied weights, text."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", families(TINY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_read_by_rows_equals_one_that_transformers_loads(
    tmp_path: Path, name: str, tied: bool, dtype: torch.dtype
) -> None:
    folder = write_tiny(name, tmp_path, seed=3, tie_word_embeddings=tied)
    config = tiny_config(folder).policy
    read, loaded = load_policy_model(config, dtype), load_model(str(folder), dtype, config.attention)
    assert read.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert list(map(type, read.modules())) == list(map(type, loaded.modules()))
    assert not any(type(module) is nn.Conv3d for module in read.modules())
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(read, kind)()), dict(getattr(loaded, kind)())
        assert ours.keys() == theirs.keys()
        for one, tensor in ours.items():
            assert tensor.dtype == theirs[one].dtype and torch.equal(tensor, theirs[one]), one


def test_ranks_of_any_number_have_the_weights_of_the_files_and_draw_the_same_others(tmp_path: Path) -> None:
    folders = [
        (write_tiny(name, tmp_path / name, seed=3, tie_word_embeddings=name == "gemma3"), overrides)
        for name, overrides in SHARED.items()
    ]
    multiprocessing.set_forkserver_preload(["loaded_ranks"])
    for num_ranks in (1, 2):
        arguments = (num_ranks, ("learner=fsdp2",), folders, tmp_path)
        mp.start_processes(load_all, args=arguments, nprocs=num_ranks, start_method="forkserver")
    one, two = (torch.load(tmp_path / f"drawn-{num_ranks}.pt") for num_ranks in (1, 2))
    for name in SHARED:
        assert one[name].keys() == two[name].keys()
        assert all(torch.equal(tensor, two[name][key]) for key, tensor in one[name].items()), name
    assert any(key.endswith("lora_A.default.weight") for key in one["llama"])


def test_files_that_lack_a_weight_are_refused(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    rewritten(tmp_path, lambda state: {name: tensor for name, tensor in state.items() if name != NORM})
    with pytest.raises(ValueError, match=r"policy.model lacks model.norm.weight and 0 more weights"):
        load_policy_model(tiny_config(tmp_path).policy, torch.float32)


STATE = {
    "b": torch.randn(3, 5),
    "a": torch.randn(7).bfloat16(),
    "steps": torch.arange(4),
    "half": torch.randn(2, 2).half(),
    "one": torch.tensor(2.5),
    "transposed": torch.randn(4, 6).T,
}


def described(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}


@pytest.mark.parametrize("size", ["50GB", "100KB"])
def test_the_files_are_those_of_save_pretrained(tmp_path: Path, size: str) -> None:
    folder = write_tiny("qwen2.5-vl", tmp_path / "model", seed=0, tie_word_embeddings=False)
    model = load_model(str(folder), torch.float32, "sdpa").bfloat16()
    model.model.language_model.norm.float()
    model.save_pretrained(tmp_path / "expected", max_shard_size=size, save_original_format=False)
    state = model.state_dict()
    (tmp_path / "out").mkdir()
    write_weights(tmp_path / "out", "model", described(state), reversed(state.items()), size)
    files = sorted(tmp_path.glob("expected/*.safetensors"))
    assert (len(files) > 1) == (size == "100KB")
    assert [file.name for file in files] == sorted(file.name for file in tmp_path.glob("out/*.safetensors"))
    assert all((tmp_path / "out" / file.name).read_bytes() == file.read_bytes() for file in files)
    if size == "100KB":
        found, expected = (tmp_path / name / f"{WEIGHTS}.index.json" for name in ("out", "expected"))
        assert json.loads(found.read_text()) == json.loads(expected.read_text())


def test_every_dtype_is_read_back(tmp_path: Path) -> None:
    write_weights(tmp_path, "model", described(STATE), STATE.items(), "50GB")
    found = load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items()) and found.keys() == STATE.keys()
    whole = save({name: tensor.contiguous() for name, tensor in STATE.items()}, metadata={"format": "pt"})
    assert (tmp_path / WEIGHTS).read_bytes() == whole


def test_a_tensor_that_never_came_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks 1 tensors, such as one"):
        write_weights(tmp_path, "model", described(STATE), [i for i in STATE.items() if i[0] != "one"], "50GB")


def test_an_export_that_fails_gathers_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for this one in every gather."""
    folder = write_tiny("qwen2.5-vl", tmp_path / "model", seed=0, tie_word_embeddings=False)
    learner = connected_learner(tiny_config(folder))
    gathered = []
    whole = learner.backend.full_state
    monkeypatch.setattr(learner.backend, "full_state", lambda _: (gathered.append(n) or (n, t) for n, t in whole()))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        learner.export(tmp_path / "file")
    assert len(gathered) == len(dict(whole()))
    learner.update(random_groups(AutoTokenizer.from_pretrained(folder), 3, 2), 1)


def rounded(folder: Path, name: str, dtype: torch.dtype, *, tied: bool = False, key: str = "dtype") -> Path:
    """A tiny checkpoint in `dtype`, its last norm in float32."""
    write_tiny(name, folder, tie_word_embeddings=tied)
    rewritten(folder, lambda state: {n: t if n == NORM else t.to(dtype) for n, t in state.items()})
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(settings | {key: str(dtype).removeprefix("torch.")}))
    return folder


def exported(folder: Path, out: Path, dtype: str = "") -> PreTrainedModel:
    """The model in `folder`, which is written to `out`."""
    model = load_model(str(folder), torch.float32, "sdpa")
    save_policy(model, str(folder), out, model.state_dict(), model.state_dict().items(), dtype)
    return model


def dtypes(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_dtype(folder: Path) -> str:
    settings = json.loads((folder / "config.json").read_text())
    return settings.get("dtype") or settings["torch_dtype"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2.5-vl", "smolvlm", "qwen2.5-omni"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_tensors_and_config_keep_their_dtypes(tmp_path: Path, name: str, tied: bool, key: str) -> None:
    folder = rounded(tmp_path / "model", name, torch.bfloat16, tied=tied, key=key)
    exported(folder, tmp_path / "out")
    assert dtypes(tmp_path / "out") == dtypes(folder)
    assert config_dtype(tmp_path / "out") == "bfloat16"
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_another_dtype_is_that_of_all_tensors_and_of_every_part_of_the_config(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "model", "qwen2.5-vl", torch.bfloat16)
    model = exported(folder, tmp_path / "out", "float16")
    assert set(dtypes(tmp_path / "out").values()) == {torch.float16}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    assert {part["dtype"] for part in parts if "dtype" in part} == {"float16"}
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "out").dtype == torch.float16
    model.lm_head.weight.data[0, 0] = 1e6
    with pytest.raises(ValueError, match="lm_head.weight has values that float16 does not hold"):
        save_policy(model, str(folder), tmp_path / "over", model.state_dict(), model.state_dict().items(), "float16")


def test_the_files_beside_the_weights_are_copied_as_they_are(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "model", "llama", torch.bfloat16)
    # transformers loads this file and refuses to write it.
    generation = json.dumps({"temperature": 0.6, "do_sample": False, "eos_token_id": [1, 2]})
    (folder / "generation_config.json").write_text(generation)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    for spare in ("consolidated.safetensors", "model-q4.gguf", "pytorch_model.bin", "README.md"):
        (folder / spare).write_text("x")
    exported(folder, tmp_path / "out")
    assert (tmp_path / "out" / "generation_config.json").read_text() == generation
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").is_file()
    left_out = {"consolidated.safetensors", "model-q4.gguf", "pytorch_model.bin"}
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f.name for f in folder.iterdir()} - left_out


def test_merged_adapters_keep_the_dtypes_as_well(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "model", "qwen2.5-vl", torch.bfloat16)
    config = tiny_config(folder, "policy.lora.rank=4")
    model, stored = unread_trained_model(config)
    weights = PolicyWeights(model, config)
    backend = SingleBackend(torch.device("cpu"), torch.float32, config.learner)
    backend.wrap(as_policy(model, config), stored)
    save_policy(model, str(folder), tmp_path / "out", weights.described, weights.plain_state(backend))
    assert dtypes(tmp_path / "out") == dtypes(folder)


def test_an_untied_copy_of_a_tied_head_is_not_written(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "model", "llama", torch.bfloat16, tied=True)
    names = dtypes(folder).keys()
    rewritten(folder, lambda state: state | {HEAD: state[EMBEDDING]})
    exported(folder, tmp_path / "out")
    assert dtypes(tmp_path / "out").keys() == names
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tie_word_embeddings


QWEN = {"sliding_window": 64, "use_sliding_window": True, "layer_types": None}
KINDS = {
    "attention_dropout": 0.5, "hidden_dropout": 0.5, "dropout": 0.5, "activation_dropout": 0.5, "embd_pdrop": 0.5,
    "drop_path_rate": 0.5, "layerdrop": 0.5, "encoder_layerdrop": 0.5, "hidden_dropout_prob": 0.5,
    "attention_probs_dropout_prob": 0.5, "projection_dropout": 0.5,
}  # fmt: skip


def with_dropout(folder: Path) -> Path:
    """The checkpoint with every kind of dropout in every part of its config.json."""

    def set_all(part: dict[str, Any]) -> dict[str, Any]:
        below = {key: set_all(value) if key.endswith("_config") else value for key, value in part.items()}
        return below | KINDS

    file = folder / "config.json"
    file.write_text(json.dumps(set_all(json.loads(file.read_text()))))
    return folder


@torch.no_grad()
def trained_twice(folder: Path, *words: str) -> tuple[Tensor, Tensor, nn.Module]:
    """Log-probs of one row in two forward passes in training mode, and the model."""
    config = load_config(["experiment=digits", f"policy.model={folder}", "learner.packing=false", *words])
    policy = TokenPolicy(load_policy_model(config.policy, torch.float32), config.learner).train()
    ids = np.random.default_rng(0).integers(0, 200, 30).astype(np.int32)
    batch = collated([TokenSequence(ids, 10, (), ())])
    return policy(batch, PLAIN).logprobs, policy(batch, PLAIN).logprobs, policy.model


def probabilities(model: nn.Module) -> Mapping[str, float]:
    """Those of every random part of training mode."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in [*vars(module).items(), *([("drop", module.p)] if isinstance(module, nn.Dropout) else [])]
        if isinstance(value, float) and any(part in key for part in RANDOM_PARTS.split("|"))
    }


@pytest.mark.parametrize("name", families(TINY))
def test_dropout_of_a_checkpoint_is_off_in_training(tmp_path: Path, name: str) -> None:
    first, second, model = trained_twice(with_dropout(write_tiny(name, tmp_path / "m")))
    assert torch.equal(first, second)
    assert probabilities(model) and set(probabilities(model).values()) == {0.0}


def test_dropout_is_kept_where_a_run_asks_for_it(tmp_path: Path) -> None:
    folder = with_dropout(write_tiny("qwen2.5-vl", tmp_path / "m"))
    first, second, model = trained_twice(folder, "policy.dropout=true", "supervision.on_logprob_gap=warn")
    assert (first - second).abs().max() > 0.01
    assert 0.5 in probabilities(model).values()


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale"])
def test_capped_or_scaled_logits_are_refused_by_their_key(tmp_path: Path, key: str) -> None:
    model = edited(write_text_policy(tmp_path / "m", "gemma3_text"), **{key: 30.0})
    with pytest.raises(PreflightError, match=rf"policy\.model=.* has {key}=30\.0 in its config\.json"):
        prepare(load_config(["experiment=own", f"policy.model={model}", f"data.path={tmp_path}"]), lambda media: media)


@pytest.mark.parametrize(
    ("family", "values", "window"),
    [
        ("llama", {}, None),
        ("llama", {"sliding_window": 64}, 64),  # transformers ignores it, vLLM does not
        ("mistral", {"sliding_window": 64}, None),  # all layers in both
        ("mistral", {"sliding_window": None}, None),
        ("gemma3_text", {"sliding_window": 16}, None),  # by layer in both
        ("qwen2", {**QWEN, "use_sliding_window": False}, None),
        ("qwen2", {**QWEN, "max_window_layers": 0}, None),
        # As Qwen 2.5 is released: no layer in transformers, every layer in vLLM.
        ("qwen2", {**QWEN, "max_window_layers": 2}, 64),
        ("qwen2", {**QWEN, "max_window_layers": 1}, 64),
    ],
)
def test_windows_in_which_engine_and_learner_differ_are_found(
    tmp_path: Path, family: str, values: dict[str, Any], window: int | None
) -> None:
    model = edited(write_text_policy(tmp_path / "m", family), **values)
    assert unequal_window(str(model)) == window
    words = ["experiment=own", f"policy.model={model}", f"data.path={tmp_path}", "data.max_prompt_tokens=32"]
    longer = "max_model_len=65 is longer: set sampler.max_model_len=64 or less" if window else "train"
    for length, match in ((65, longer), (64, "train")):  # the data is what is missing next
        with pytest.raises(PreflightError, match=match):
            prepare(
                load_config([*words, "sampler.max_tokens=16", f"sampler.max_model_len={length}"]), lambda media: media
            )


NAMES = (
    "visual.blocks.0.attn.qkv.weight",
    "visual.merger.mlp.0.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.experts.0.up_proj.weight",
    "model.layers.0.mlp.experts.1.up_proj.weight",
    "model.norm.weight",
)


@pytest.mark.parametrize(
    ("freeze", "left_out"),
    [
        ("", ()),
        ("vision", NAMES[:2]),
        ("visual.merger.", NAMES[1:2]),
        ("model.layers.0.self_attn.q_proj", ()),  # one layer of vLLM together with k_proj
        ("model.layers.0.mlp.experts.1.", ()),
        ("model.layers.0.mlp.experts.", NAMES[5:7]),
    ],
)
def test_frozen_tensors_are_not_sent_except_those_that_vllm_loads_with_trained_ones(
    freeze: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    whole = Manifest(tuple(TensorSpec(name, (4, 4), "float32") for name in NAMES))
    config = tiny_config(tmp_path / "model", f"policy.freeze=[{freeze}]")
    pushed = pushed_manifest(whole, config)
    assert [spec.name for spec in pushed.tensors] == [name for name in NAMES if name not in left_out]
    discards = {"colocated": True, "sleep_level": 2}
    asleep = config.model_copy(update={"resources": config.resources.model_copy(update=discards)})
    assert pushed_manifest(whole, asleep) == whole
