"""Keys of one kind: dropped where an option sets them for another kind, refused where the user does."""

from pathlib import Path

import pytest
import yaml

from mobula.configs.errors import ConfigError
from mobula.configs.load import dump_config, load_config, load_resolved
from mobula.configs.schema import RunConfig
from mobula.configs.schema.rollout import VLLMConfig


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sampler=huggingface", "sampler.vllm.kv_cache_bytes=1"],
            r"sampler\.vllm\.kv_cache_bytes=1 is not read with sampler\.kind=huggingface: .*set sampler\.kind=vllm",
        ),
        (["sampler.flow.height=8"], r"is not read with sampler\.kind=vllm: leave it out, or set sampler\.kind=flow"),
        (["offline.dpo.beta=0.2"], r"is not read with offline\.job=none: leave it out, or set offline\.job=dpo"),
        (["offline={job: sft, dpo: {beta: 0.2}}"], r"is not read with offline\.job=sft"),
        (["sampler.kv_cache_bytes=1"], r"did you mean sampler\.vllm\.kv_cache_bytes"),
        (["sampler.block_size=16"], r"did you mean sampler\.vllm\.block_size"),
    ],
)
def test_a_word_for_another_kind_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["experiment=digits", *words])


def test_a_preset_for_another_kind_is_dropped(tmp_path: Path) -> None:
    config = load_config(["experiment=digits", "resources=two_gpu", "sampler=huggingface"])
    assert config.sampler.vllm == VLLMConfig()
    assert load_config(["experiment=digits", "resources=two_gpu"]).sampler.vllm.kv_cache_bytes == 0
    dumped = dump_config(config)
    assert not {"vllm", "flow", "image_tokens"} & yaml.safe_load(dumped)["sampler"].keys()
    path = tmp_path / "config.yaml"
    path.write_text(dumped)
    assert load_resolved(path) == config
    path.write_text(dumped.replace("kind: huggingface\n", "kind: huggingface\n  vllm: {block_size: 16}\n"))
    with pytest.raises(ConfigError, match=r"sampler\.vllm is not read with sampler\.kind=huggingface"):
        load_resolved(path)


def test_own_code_reads_the_section_of_every_kind() -> None:
    config = load_config(["experiment=digits", "sampler.kind=own.py:Sampler", "sampler.vllm.block_size=16"])
    assert isinstance(config, RunConfig) and config.sampler.vllm.block_size == 16
