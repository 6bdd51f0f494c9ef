"""Functions of the user's, run in a worker: whatever they do, the worker answers and goes on."""

from __future__ import annotations

import cloudpickle

from llmrt.errors import RankFailure
from llmrt.messages import CallFunction, FunctionRaised, FunctionReturned


def call_function(
    command: CallFunction, first_argument: object, rank: int
) -> FunctionReturned | FunctionRaised:
    """Call the function with *first_argument* before its own.

    Even SystemExit and KeyboardInterrupt only fail the call: a worker's end is not the function's
    to decide.
    """
    try:
        function, args, kwargs = cloudpickle.loads(command.payload)
        result = function(first_argument, *args, **kwargs)
    except BaseException as error:
        return FunctionRaised(failure=RankFailure.of(rank, error))
    return _pickled(result, rank)


def _pickled(result: object, rank: int) -> FunctionReturned | FunctionRaised:
    try:
        return FunctionReturned(payload=cloudpickle.dumps(result))
    except Exception as error:
        kind = type(result)
        reason = TypeError(
            f"the function returned an object of {kind.__module__}.{kind.__qualname__}, which "
            f"cannot be sent back: {type(error).__name__}: {error}"
        )
        return FunctionRaised(
            failure=RankFailure.of(rank, reason.with_traceback(error.__traceback__))
        )
