"""The root of every error that cosytriton raises on purpose.

    CosytritonError
    ├── CheckpointError   a checkpoint directory that cannot be read as it claims (cosytriton_export)
    ├── ExportError       a graph that cannot be exported or is outside its tolerance (cosytriton_export)
    ├── CalibrationError  recordings, texts or a calibration set that cannot be used (cosytriton_engines)
    ├── EvaluationError   a variant that cannot be compared with FP32 (cosytriton_engines)
    ├── BuildError        a variant that does not keep its quality (cosytriton_engines)
    ├── BenchError        a benchmark that would compare wrong results (cosytriton_bench)
    ├── EngineError       TensorRT is missing, or cannot build, open or run an engine (cosytriton_engines)
    ├── RepositoryError   a model repository that is incomplete or does not fit its declaration
    ├── ServerError       tritonserver cannot start, or stopped
    ├── InputError        a request that cannot be spoken (wrong audio, wrong text)
    ├── QueueFullError    the server holds as many requests as it may
    ├── CancelledError    whoever asked has gone
    ├── GenerationError   a request failed while its speech was made
    └── ClientError       everything that a client call can raise (cosytriton_client)

A message says what was given, what is allowed and what to do.
"""


class CosytritonError(Exception):
    """Base of all; `str(error)` is written for the person who made the call."""


class RepositoryError(CosytritonError):
    """The model repository is incomplete, or a file in it does not fit its declaration."""


class ServerError(CosytritonError):
    """The Triton server cannot be started, or it stopped."""


class InputError(CosytritonError):
    """A request that cannot be spoken; the message names the input, the value and the limit."""


class QueueFullError(CosytritonError):
    """The server holds as many requests as it may; try again later."""


class CancelledError(CosytritonError):
    """Whoever made the request cancelled it."""


class GenerationError(CosytritonError):
    """A request failed while its speech was made; other requests are not concerned."""
