"""Errors that users see. One type per boundary; each message names the thing, the value and the fix.

`assert` marks our own bugs; everything a user can cause is a subclass of RlagentError.
"""


class RlagentError(Exception):
    """Base of every error rlagent raises for a user's mistake or an outside failure."""


class ConfigError(RlagentError):
    """A setting is unknown, malformed or contradicts another one."""


class LoadError(RlagentError):
    """A `file.py:function`, a model directory, a task file or a tokenizer could not be loaded."""


class StoreError(RlagentError):
    """The data buffer refused or could not make a change durable."""


class StoreUncertainError(StoreError):
    """The database went away in the middle of a commit: the change may be stored or not."""


class EngineError(RlagentError):
    """An engine is down, refused a request or answered something outside its protocol."""


class RecordingError(RlagentError):
    """What an engine answered cannot be recorded exactly (lengths, non-finite logprobs, unknown ids)."""


class RouterError(RlagentError):
    """The router answered one of our own clients with an error, or could not be reached."""


class RolloutError(RlagentError):
    """A rollout function broke its contract (wrong return type, non-finite reward, timeout)."""


class LearnerError(RlagentError):
    """The learner cannot go on: a rank died, a loss is not finite, a layout does not fit the model."""


class WeightSyncError(RlagentError):
    """An engine did not take, or does not hold, the weights that were published."""


class Terminated(RlagentError):
    """The run was asked to end (SIGTERM), and ended with a checkpoint."""


class AlarmError(RlagentError):
    """An alarm whose action is to stop the run has fired."""


class CheckpointError(RlagentError):
    """A checkpoint is torn, of another model, or of another run."""


class SandboxError(RlagentError):
    """A sandbox could not be made, or an operation on it is not allowed."""


class VerifierError(RlagentError):
    """A verifier cannot give a number: the task lacks a field, an endpoint answered something else."""


class VerifierCrashError(VerifierError):
    """The process that a verifier ran in died."""


class EnvironmentFailedError(RlagentError):
    """An environment server cannot be reached, or refused a step."""


class RequestError(StoreError):
    """What was asked of the data buffer makes no sense by itself; asking again does not help."""


class ConflictError(StoreError):
    """The data buffer refused a change because of what it holds (a sealed session, a used key, an ended lease)."""


class MovedError(ConflictError):
    """The session was taken over by another replica of the router, or read again by this one, under the call."""


class NotFoundError(StoreError):
    """The data buffer holds no session, lease or publish of this name."""


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions a group is made of, or the exception itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]
