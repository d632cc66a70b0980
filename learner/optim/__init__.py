"""Optimizers by the name in `learner.optimizer`, slow weights and averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from mobula.cluster.errors import CheckpointError
from mobula.cluster.user_code import chosen
from mobula.configs.schema import LearnerConfig, WarmStartConfig
from mobula.learner.state_files import is_complete, read_index, read_state

NOT_HIDDEN = ("embed", "lm_head")  # parts of a name: their rows are tokens or positions, not a linear map of features


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's own Muon and AdamW over one set of parameter groups and one state, so that it is saved as one optimizer.

    Muon's step is scaled to the root mean square of AdamW's, so that both take one learning rate.

    Source: Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.2.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], config: LearnerConfig) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named:
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1  # one row is a scalar head, so a vector
            is_hidden = is_matrix and not any(part in name for part in NOT_HIDDEN)
            (matrices if is_hidden else others).append(parameter)
        self._inner: list[torch.optim.Optimizer] = []
        if matrices:
            own: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
            own |= {"momentum": config.muon_momentum, "adjust_lr_fn": "match_rms_adamw"}
            self._inner.append(torch.optim.Muon(matrices, **own))
        if others:
            self._inner.append(torch.optim.AdamW(others, weight_decay=0.0, **_adam_settings(config)))
        super().__init__([group for inner in self._inner for group in inner.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller has a closure
        """One step of each part, on the groups and the state of the whole: loading a state replaces both."""
        assert closure is None, "the gradients are computed before the step"
        for inner, group in zip(self._inner, self.param_groups, strict=True):
            inner.param_groups = [group]
            inner.state = self.state
            inner.step()


AVERAGE_FOLDER = "average"  # of a learner's state

OFF = {
    AVERAGE_FOLDER: "learner.ema_decay=0",
    "slow": "algorithm.losses.nft.max_decay=0",
}  # what keeps none, by its folder

Copy = Callable[[dict[str, Any], Path], Callable[[], None]]


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, after each optimizer step of RL.

    It has tensors of its own, of this rank's shards, in the type of the weights (float32). Its methods but `update` are
    collective.

    Source: Acceleration of Stochastic Approximation by Averaging, doi:10.1137/0330046.

    Example:
        average = WeightAverage(backend.trained, decay=0.999, copy=ShardedWriter().copied)
        average.begin()  # RL begins with these weights
        optimizer.step()
        average.update()
    """

    folder = AVERAGE_FOLDER

    def __init__(self, trained: Callable[[], dict[str, Tensor]], decay: float, copy: Copy) -> None:
        """`trained` returns this rank's shards (`Backend.trained`); `copy(state, folder)` returns a function that
        writes a copy of `state`."""
        self._decay = decay
        self._copy = copy
        self._trained = trained
        self.tensors = {name: weight.detach().clone() for name, weight in trained().items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Resets the average to the current weights."""
        torch._foreach_copy_(local(self.tensors.values()), self._weights())

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average."""
        torch._foreach_lerp_(local(self.tensors.values()), self._weights(), 1 - self._decay)

    def _weights(self) -> list[Tensor]:
        return local(self._trained().values())

    def to(self, device: torch.device) -> None:
        """Moves the average; `update` needs it on the device of the weights."""
        self.tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        return self._copy(self.tensors, folder / self.folder)

    def load(self, folder: Path) -> None:
        read_average(folder, self.tensors, no_dist=not dist.is_initialized(), name=self.folder)


class NullAverage:
    """Null object of WeightAverage."""

    def begin(self) -> None: ...

    def update(self) -> None: ...

    def to(self, device: torch.device) -> None: ...

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        return lambda: None

    def load(self, folder: Path) -> None: ...


def refuse_without_average(folder: Path, name: str = AVERAGE_FOLDER) -> None:
    """Raises: CheckpointError: there is no average called `name` in a learner's state in `folder`."""
    if not is_complete(folder / name):
        raise CheckpointError(
            f"{folder} holds no average of the weights: a run with {OFF[name]} wrote it, so resume with that, or start "
            "a new run"
        )


def read_average(folder: Path, tensors: dict[str, Tensor], *, no_dist: bool, name: str = AVERAGE_FOLDER) -> None:
    """Fill `tensors`, by their names in the policy, with the average called `name` of a learner's state in `folder`."""
    refuse_without_average(folder, name)
    index = read_index(folder / name)
    saved = index.state_dict_metadata
    # DeepSpeed saves its shards flat and padded.
    sizes = {n: tensor.size for n, tensor in saved.items() if isinstance(tensor, TensorStorageMetadata)}
    read = {n: t if sizes[n] == t.shape else t.new_empty(sizes[n]) for n, t in tensors.items()}
    read_state(read, folder / name, index, no_dist=no_dist)
    for n, t in tensors.items():
        if read[n] is not t:
            t.copy_(read[n][: t.numel()].view_as(t))


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local shard of each tensor."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


CHUNK = 1 << 24  # values that are computed in float32 at one time
LOW_BITS = 16  # those of a float32 that bfloat16 lacks


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose weights and moments have the type of the parameters and are rounded stochastically.

    Rounded to the nearest, an update below 1/512 of its weight is lost, and so is a decay of the second moment below
    1/512 of it. The random numbers follow from the step, the parameter and the shard: a resumed run draws them again,
    and ranks that hold the same shard of several replicas draw the same.

    Sources: arXiv:1711.05101 (AdamW); arXiv:2010.06192 (stochastic rounding of weights in bfloat16).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller has a closure
        assert closure is None, "the gradients are computed before the step"
        numbered = enumerate((group, parameter) for group in self.param_groups for parameter in group["params"])
        for number, (group, parameter) in numbered:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                tensors = local((parameter, parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"]))
                generator = _generator(parameter, int(state["step"]), number)
                for parts in zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True):
                    _update(*parts, step=float(state["step"]), group=group, generator=generator)


def _update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: float,
    group: dict[str, Any],
    generator: torch.Generator,
) -> None:
    beta1, beta2 = group["betas"]
    gradient = gradient.float()
    new_mean = mean.float().lerp(gradient, 1 - beta1)
    new_square = square.float().mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (new_square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    decayed = weight.float().mul(1 - group["lr"] * group["weight_decay"])
    new_weight = decayed.addcdiv_(new_mean, scale, value=-group["lr"] / (1 - beta1**step))
    for old, new in ((weight, new_weight), (mean, new_mean), (square, new_square)):
        old.copy_(new if old.dtype is torch.float32 else rounded(new, generator))


def rounded(values: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds float32 values stochastically to bfloat16: up with probability (value - lower) / (upper - lower), where
    lower and upper are the neighbours in bfloat16. The mean of the result is the value."""
    noise = torch.randint(1 << LOW_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << LOW_BITS)
    return bits.view(torch.float32).to(torch.bfloat16)


def _generator(parameter: Tensor, step: int, number: int) -> torch.Generator:
    shard = 0
    if isinstance(parameter, DTensor):
        shard = parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
    return torch.Generator(parameter.device).manual_seed(hash((step, number, shard)) & (1 << 63) - 1)


SLOW_FOLDER = "slow"  # of a learner's state


class SlowWeights(WeightAverage):
    """slow = d * slow + (1 - d) * weights after each step v, with d = min(max_decay, decay_rate * v).

    Source: DiffusionNFT, arXiv:2509.16117, section 3.3: the old policy is moved softly.
    """

    folder = SLOW_FOLDER

    def __init__(
        self, trained: Callable[[], dict[str, Tensor]], decay_rate: float, max_decay: float, copy: Copy
    ) -> None:
        super().__init__(trained, max_decay, copy)
        self._decay_rate, self._max_decay = decay_rate, max_decay

    def follow(self, version: int) -> None:
        """Moves the copy towards the weights after step `version`."""
        self._decay = min(self._max_decay, self._decay_rate * version)
        self.update()

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Swaps the slow weights into the policy while the body runs. No gradient may be accumulated."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        slow, weights = local(self.tensors.values()), self._weights()
        trained = [w.detach().clone() for w in weights]
        torch._foreach_copy_(weights, slow)
        torch._foreach_copy_(slow, trained)


class NullSlow(NullAverage):
    """Null object of SlowWeights, for runs that sample with the trained policy."""

    def follow(self, version: int) -> None: ...

    def in_place(self) -> AbstractContextManager[None]:
        return nullcontext()


Named = list[tuple[str, nn.Parameter]]


SETTINGS = ("betas", "eps", "weight_decay", "momentum")  # keys of a parameter group; steps set `lr`


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], config: LearnerConfig) -> torch.optim.Optimizer:
    """Builds the optimizer of `learner.optimizer` over the trained parameters; vectors (biases, norms) do not decay."""
    trained = [(name, p) for name, p in named if p.requires_grad]
    optimizer = optimizer_maker(config)(trained, config)
    # Loading a state replaces the settings of its groups too, but a resumed run takes them from its configuration.
    names = {*SETTINGS, *config.optimizer_options}
    kept = [{name: group[name] for name in names & group.keys()} for group in optimizer.param_groups]

    def restore(loaded: torch.optim.Optimizer) -> None:
        for group, own in zip(loaded.param_groups, kept, strict=True):
            group.update(own)

    optimizer.register_load_state_dict_post_hook(restore)
    return optimizer


def optimizer_maker(config: LearnerConfig) -> Callable[[Named, LearnerConfig], torch.optim.Optimizer]:
    given = ("named_parameters", "config")
    return chosen(OPTIMIZERS, config.optimizer, "learner.optimizer", given, config.optimizer_options)


def _adamw(trained: Named, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW. Source: arXiv:1711.05101."""
    if config.master_dtype == "bfloat16":
        return RoundedAdamW(_decay_groups(trained, config), **_adam_settings(config))
    return torch.optim.AdamW(_decay_groups(trained, config), **_adam_settings(config), fused=True)


def _adamw_8bit(trained: Named, config: LearnerConfig) -> torch.optim.Optimizer:
    """AdamW with moments of a byte each. Raises ValueError where torchao is not installed."""
    try:
        from mobula.learner.optim.adamw_8bit import AdamWOfBytes
    except ModuleNotFoundError as error:
        raise ValueError(
            f"learner.optimizer=adamw_8bit needs {error.name!r}, which is not installed: "
            "pip install 'mobula[quantised]', or set learner.optimizer=adamw"
        ) from error
    return AdamWOfBytes(_decay_groups(trained, config), **_adam_settings(config))


OPTIMIZERS: dict[str, Callable[[Named, LearnerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "muon": MuonWithAdamW,
}


def _decay_groups(trained: Named, config: LearnerConfig) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam_settings(config: LearnerConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.adam_eps}


def learning_rate(config: LearnerConfig, step: int, num_steps: int) -> float:
    """The learning rate of step `step` (from 0): linear over `warmup_steps`, then by `schedule` towards 0 at the end.

    Depends only on the step, so that there is no scheduler state to save and a resumed run is exact.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1), 1.0)
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1 - progress)
        case "cosine":
            return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2


TAUGHT_WARMUP_STEPS = 30  # of the cosine schedule of the warm start


def taught_rate(config: WarmStartConfig, step: int) -> float:
    """The learning rate of warm-start step `step` (from 0); a cosine ends at a tenth of the peak."""
    if config.schedule == "constant":
        return config.learning_rate
    rise = min(1.0, (step + 1) / TAUGHT_WARMUP_STEPS)
    return config.learning_rate * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / config.num_steps)))
