"""Works of offline jobs: supervised fine-tuning and DPO."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.rounds import Side
from benchmarks.peers.skewed import write_chats
from benchmarks.peers.works.work import NUM_WARMUP, OURS, STEADY, TURNS, Work, mobula_side, peer_side
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import ensure_data, ensure_model

PACK_TOKENS = 576  # of a packed row of supervised fine-tuning


def sft(
    name: str, peer: str, policy: str, *, num_packs: int, num_rows: int, num_steps: int, target: float = 1.0
) -> Work:
    """Supervised fine-tuning on skewed lengths; `num_rows` fill the packs of a step as the peer fills them.

    An epoch has as many steps as the work counts, so that both sides train on the same rows.
    """
    num_in_epoch = num_rows * num_steps
    own = (
        "experiment=sft",
        f"policy={policy}",
        f"data.path=data/skewed-{num_in_epoch}",
        *TURNS,
        "learner.packing=true",
        "learner.activation_checkpointing=none",
        f"learner.tokens_per_microbatch={num_packs * PACK_TOKENS}",
        f"offline.batch_size={num_rows}",
        f"offline.max_tokens={PACK_TOKENS}",
        *STEADY,
    )

    def sides(num_steps: int) -> Sequence[Side]:
        config = load_config(own)
        ensure_model(config)
        asked = {
            "model": config.policy.model,
            "data": write_chats(config.data.path, num_in_epoch),
            "row-tokens": PACK_TOKENS,
            "rows": num_packs,
            "steps": num_steps + NUM_WARMUP + 1,
            "learning-rate": config.learner.learning_rate,
        }
        return (mobula_side(OURS, "sft", own, num_steps), peer_side(peer, peer, f"{peer}_sft", asked))

    return Work(
        name,
        peer,
        num_steps,
        sides,
        {OURS: target},
        equal="checkpoint, rows, loss on the answers alone, packed rows, optimizer (AdamW), two threads",
        unequal=f"{num_rows} rows a step beside {num_packs} packs of {PACK_TOKENS} tokens, which hold as many in the "
        "mean",
        unit="tokens",
    )


def dpo(name: str, *, num_rows: int, num_pairs: int, num_steps: int) -> Work:
    """DPO on pairs of answers about images, by TRL and by us; `num_rows` pairs in all, `num_pairs` a step."""
    own = (
        "experiment=dpo_digits",
        *TURNS,
        f"offline.batch_size={num_pairs}",
        *STEADY,
    )

    def sides(num_steps: int) -> Sequence[Side]:
        config = load_config(own)
        ensure_model(config)
        ensure_data(config)
        asked = {
            "model": config.policy.model,
            "data": config.data.path,
            "pairs": num_pairs,
            "rows": num_rows,
            "steps": num_steps + NUM_WARMUP + 1,
            "beta": config.offline.dpo.beta,
            "learning-rate": config.learner.learning_rate,
        }
        return (mobula_side(OURS, "dpo", own, num_steps), peer_side("trl", "trl", "trl_dpo", asked))

    return Work(
        name,
        "trl",
        num_steps,
        sides,
        {OURS: 1.2},
        equal="checkpoint, pairs of a step, beta, reference model, one optimizer step (AdamW) a batch",
        unequal="TRL computes the reference in its trainer, we in a process beside it; TRL counts line ends too",
    )
