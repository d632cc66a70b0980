"""Every key of the configuration is declared: refused, named or free when a resumed run sets it otherwise."""

from __future__ import annotations

import pytest

from mobula.configs.keys import known_keys
from mobula.configs.on_resume import BY_NAME, DECLARED, OnResume, on_resume

# In these sections each key is declared by itself: most of them shape the state of a checkpoint.
BY_ITSELF = ("policy", "learner")


def test_every_key_is_declared() -> None:
    undeclared = [key for key in known_keys() if on_resume(key) is None and not _holds_declared(key)]
    assert undeclared == [], "add them to configs/on_resume.py"


def test_keys_that_shape_a_checkpoint_are_declared_one_by_one() -> None:
    found = [key for key, info in known_keys().items() if key.split(".")[0] in BY_ITSELF and info.section is None]
    assert [key for key in found if key not in BY_NAME] == [], "add them to configs/on_resume.py"


def test_what_is_declared_is_a_key_and_is_declared_once() -> None:
    assert [name for name in BY_NAME if name not in known_keys()] == []
    assert len(BY_NAME) == sum(len(names) for names in DECLARED.values())


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("policy.lora.rank", OnResume.REFUSED),
        ("policy.lora.alpha", OnResume.REFUSED),
        ("learner.optimizer", OnResume.REFUSED),
        ("learner.learning_rate", OnResume.NAMED),
        ("rewards.components", OnResume.NAMED),
        ("algorithm.losses.ppo_clip.clip_low", OnResume.NAMED),
        ("data.system_prompt", OnResume.NAMED),
        ("data.curriculum.key", OnResume.REFUSED),
        ("resources.dtype", OnResume.REFUSED),
        ("resources.rollout.num_workers", OnResume.FREE),
        ("metrics.tensorboard", OnResume.FREE),
        ("nowhere.key", None),
    ],
)
def test_the_longest_declared_name_counts(key: str, kind: OnResume | None) -> None:
    assert on_resume(key) is kind


def _holds_declared(key: str) -> bool:
    return any(name.startswith(f"{key}.") for name in BY_NAME)
