"""The exception tree of a run.

    MobulaError
    ├── PreflightError          the run cannot start: a preset, a path or a dataset is unfit (never raised later)
    │   ├── PlacementError      the cluster cannot hold the resource preset
    │   └── DatasetError        nothing to train on, or a row that may not be skipped
    ├── SkippedSample           one sample is unusable; it is skipped, counted and named
    │   ├── MediaError          one picture is missing, corrupt, too large or no picture
    │   ├── PromptError         one prompt is too long or its placeholders do not match its media
    │   ├── ChangedDataError    the data no longer give the prompt that a recorded group was sampled from
    │   └── ExcludedPromptError one prompt ended several engines in a row with the same cause
    ├── DeadlineError           something did not answer in time; the message names what was waited for
    ├── WorkerDiedError         a role's process ended or no longer answers; the message names it
    │   └── RestartLoopError    workers end again and again with one cause, which a restart does not change
    ├── StuckError              a worker's process answers, and only another process can go on
    │   └── EngineLostError     the engine inside it failed; `failure` is the cause
    ├── LostReplyError          a role's process is well, and one answer of it did not come
    ├── DependencyError         a healthy role waited in vain for another one
    ├── LostObjectError         an object went with the node that held it
    ├── RolloutError            a rollout actor could not finish a prompt
    │   └── EngineDiedError     its engine ended; `failure` is the cause
    ├── EnvironmentFailedError  an environment fails in too large a share of its episodes
    ├── RewardError             a reward function failed, timed out or returned something that is not a finite number
    │   └── UnscoredGroupError  a group cost one reward worker after the other; no response of it has a reward
    ├── ScoringError            a reference scorer could not get at the pictures of what it was to score
    ├── WeightSyncError         weights could not be moved or verified
    │   ├── ManifestError       sender and receiver disagree on names, shapes or dtypes
    │   └── CanaryError         after a push the engine does not equal the learner
    ├── CheckpointError         a checkpoint cannot be written or is not complete
    ├── JournalError            the journal cannot be written, or a step that it holds cannot be trained again
    ├── LogprobGapError         engine and learner compute other log-probs at equal weights
    ├── NothingTrainedError     every optimizer step of a run was skipped
    └── RunOverError            a command found that the run is over, or that its driver is dead

User mistakes in a configuration are `ValueError`s (`mobula.configs.load.ConfigError`); these here belong to the run.
`RunStopped` is no error: it ends the loop of a run that was asked to stop.
"""

from __future__ import annotations

from typing import Any

from mobula.cluster.failures import Failure


class MobulaError(Exception):
    """Base of everything that a run raises on purpose."""


class PreflightError(MobulaError):
    """The run cannot start."""


class PlacementError(PreflightError):
    """The cluster cannot hold the resource preset."""


class DatasetError(PreflightError):
    """There is nothing to train on, or the data folder is unusable."""


class SkippedSample(MobulaError):
    """Base of what makes one sample unusable: it is skipped, counted by `reason` and named in the report."""

    reason = "unusable"


class MediaError(SkippedSample):
    """One picture is missing, corrupt, too large or no picture."""

    reason = "bad_media"


class PromptError(SkippedSample):
    """One prompt is too long, or its placeholders do not match its media."""

    reason = "bad_prompt"


class ChangedDataError(SkippedSample):
    """The data no longer give the prompt that a recorded group was sampled from."""

    reason = "changed_data"


class ExcludedPromptError(SkippedSample):
    """One prompt was in flight at each of several deaths of engines with the same cause, at last alone of them."""

    reason = "killed_engines"


class DeadlineError(MobulaError, TimeoutError):
    """Something did not answer in time; the message names what was waited for and for how long."""


class WorkerDiedError(MobulaError):
    """A role's process ended or no longer answers; the message names it."""

    failure: Failure | None = None  # the cause, where it is known apart from the message


class RestartLoopError(WorkerDiedError):
    """Workers end again and again with one cause, which a restart does not change."""


class StuckError(MobulaError):
    """Work of an earlier call hangs in a worker's process: it answers, but only another process is rid of it."""


class EngineLostError(StuckError):
    """The engine inside a worker's process failed; `failure` is the cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"its engine failed: {failure}")
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.failure,), self.__dict__  # the last holds the notes


class LostReplyError(MobulaError):
    """A worker did not answer in time, and is well: the answer was lost, or would have come later."""


class DependencyError(MobulaError):
    """A healthy role waited in vain for another one, so replacing it would not help."""


class LostObjectError(MobulaError):
    """The node that held the only copy of an object is gone."""


class RolloutError(MobulaError):
    """A rollout actor could not finish a prompt."""


class EngineDiedError(RolloutError):
    """The engine of a rollout actor ended; `failure` is the cause."""

    def __init__(self, what: str, failure: Failure) -> None:
        """`what` says what the engine did not do because of it."""
        super().__init__(f"{what}: {failure}")
        self.what = what
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.failure), self.__dict__  # the last holds the notes


class EnvironmentFailedError(MobulaError):
    """An environment fails in too large a share of its episodes."""


class RewardError(MobulaError):
    """A reward function failed, timed out or returned something that is not a finite number."""


class UnscoredGroupError(RewardError):
    """A group cost one reward worker after the other; no response of it has a reward."""


class ScoringError(MobulaError):
    """A reference scorer could not get at the pictures of what it was to score."""


class WeightSyncError(MobulaError):
    """Weights could not be moved or verified."""


class ManifestError(WeightSyncError):
    """Sender and receiver disagree on tensor names, shapes or dtypes."""


class CanaryError(WeightSyncError):
    """After a push the engine does not equal the learner."""


class CheckpointError(MobulaError):
    """A checkpoint cannot be written, or is not complete."""


class LogprobGapError(MobulaError):
    """Engine and learner compute other log-probs at equal weights."""


class NothingTrainedError(MobulaError):
    """Every optimizer step of a run was skipped."""


class RunOverError(MobulaError):
    """A command found that the run is over, or that its driver is dead."""


class JournalError(MobulaError):
    """The journal cannot be written, or a step that it holds cannot be trained again."""


class RunStopped(Exception):
    """The run was asked to stop; no error."""


def as_raised_by_role(error: Exception) -> Exception:
    """An error of a role for its caller. After a deadline or death of another role it is not replaced itself."""
    return DependencyError(str(error)) if isinstance(error, (DeadlineError, WorkerDiedError)) else error


def loss_kind(error: Exception) -> str:
    """How a worker was lost, as a word to count by."""
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
