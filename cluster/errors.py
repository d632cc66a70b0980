"""The exceptions of a run.

User mistakes in a configuration are `ValueError`s (`mobula.configs.load.ConfigError`); these are for the run. No
`PreflightError` is raised after its start. `RunStopped` is not an error: it ends the loop after a stop request.
"""

from __future__ import annotations

from typing import Any

from mobula.cluster.failures import Failure

FAILED, USER_ERROR, GUARDED, INTERRUPTED = 1, 2, 3, 130  # exit codes of `mobula`


class MobulaError(Exception):
    """Base class of the errors of a run."""


class PreflightError(MobulaError):
    """The run cannot start: a preset, a path or a dataset is unusable."""


class PlacementError(PreflightError):
    """The cluster cannot hold the resource preset."""


class DatasetError(PreflightError):
    """There are no training data, or the data folder is unusable."""


class SplitNotFoundError(DatasetError):
    """The data have no such split."""


class SkippedSample(MobulaError):
    """Base of errors that make one sample unusable. The sample is skipped, counted by `reason` and reported."""

    reason = "unusable"


class MediaError(SkippedSample):
    """One image is missing, corrupt, too large or not an image."""

    reason = "bad_media"


class PromptError(SkippedSample):
    """One prompt is too long, or its placeholders do not match its media."""

    reason = "bad_prompt"


class ChangedDataError(SkippedSample):
    """The data no longer contain the prompt of a recorded group."""

    reason = "changed_data"


class ExcludedPromptError(SkippedSample):
    """One prompt was in flight at several engine crashes with the same cause, alone at the last one."""

    reason = "killed_engines"


class DeadlineError(MobulaError, TimeoutError):
    """A call was not answered in time; the message has the call and the seconds."""


class WorkerDiedError(MobulaError):
    """A role's process ended or does not answer; the message names the role."""

    failure: Failure | None = None  # the cause, if it is known in addition to the message


class RestartLoopError(WorkerDiedError):
    """Workers die repeatedly with one cause, which a restart does not remove."""


class StuckError(MobulaError):
    """A worker's process answers, but an earlier call in it hangs. It has to be replaced."""


class EngineLostError(StuckError):
    """The engine inside a worker's process failed; `failure` is the cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"its engine failed: {failure}")
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failure,), self.__dict__  # `__dict__` has the notes


class LostReplyError(MobulaError):
    """A worker is healthy but did not answer in time: its reply was lost or late."""


class DependencyError(MobulaError):
    """A healthy role waited for another role until its deadline, so a replacement would not help."""


class LostObjectError(MobulaError):
    """The node that held the only copy of an object is gone."""


class WrongGroupError(MobulaError):
    """A group has another content in the learner than its rollout actor reported."""


class RolloutError(MobulaError):
    """A rollout actor could not finish a prompt."""


class EngineDiedError(RolloutError):
    """The engine of a rollout actor ended; `failure` is the cause."""

    def __init__(self, what: str, failure: Failure) -> None:
        """`what` names the call that failed."""
        super().__init__(f"{what}: {failure}")
        self.what = what
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.failure), self.__dict__  # `__dict__` has the notes


class EnvironmentFailedError(MobulaError):
    """An environment fails in too large a share of its episodes."""


class RewardError(MobulaError):
    """A reward function failed, timed out or returned no finite number."""


class UnscoredGroupError(RewardError):
    """A group crashed several reward workers; none of its responses has a reward."""


class ScoringError(MobulaError):
    """A reference scorer could not fetch the images of a step."""


class WeightSyncError(MobulaError):
    """Weights could not be moved or verified."""


class ManifestError(WeightSyncError):
    """Sender and receiver disagree on tensor names, shapes or dtypes."""


class CanaryError(WeightSyncError):
    """After a push the log-probs of engine and learner differ."""


class CheckpointError(MobulaError):
    """A checkpoint cannot be written, or is not complete."""


class LogprobGapError(MobulaError):
    """Engine and learner compute different log-probs at equal weights."""


class RewardHackingError(MobulaError):
    """The guard stops the run: the trained reward rises while the judge falls, or responses drift."""


class NothingTrainedError(MobulaError):
    """Every optimizer step of a run was skipped."""


class ServiceFailedError(MobulaError):
    """The training service has failed; a restart with the same folder continues."""


class RunOverError(MobulaError):
    """A command found that the run is over, or that its driver is dead."""


class JournalError(MobulaError):
    """The journal cannot be written, or one of its steps cannot be repeated."""


class RunStopped(Exception):
    """Ends the loop after a stop request. This is not an error."""


def as_raised_by_role(error: Exception) -> Exception:
    """Converts an error inside a role for its caller: a deadline or death of another role becomes a DependencyError."""
    return DependencyError(str(error)) if isinstance(error, (DeadlineError, WorkerDiedError)) else error


def loss_kind(error: Exception) -> str:
    """Returns the metric label of a worker's loss."""
    match error:
        case WorkerDiedError() | EngineDiedError() | EngineLostError():
            return "died"
        case DeadlineError() | StuckError():
            return "hung"
        case CanaryError():
            return "wrong"
        case WeightSyncError():
            return "sync"
        case LostReplyError():
            return "lost_replies"
        case RolloutError():
            return "failing"
        case _:
            return "error"
