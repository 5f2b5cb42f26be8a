"""PyTorch in a process of its own: its memory is told apart, and it has the libraries of the official code.

transformers 4.51.3 asks for older tokenizers and huggingface_hub than the server does, so they lie in a
folder that this process alone has on its path.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from cosytriton_bench.errors import BenchError


class EagerProcess:
    """Calls the methods of `Eager` in another process; a context manager.

    Args:
        checkpoint: Directory of the checkpoint.
        threads: Of PyTorch; 0 takes every core.
        official: Folder with transformers and what it needs, None: they are installed.

    """

    def __init__(self, checkpoint: Path, threads: int, official: Path | None) -> None:
        self._checkpoint, self._threads, self._official = checkpoint, threads, official

    def __enter__(self) -> Self:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        command += [str(self._checkpoint), str(self._threads)]
        first = [str(self._official.resolve())] if self._official else []
        path = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=os.environ | variables)
        theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()  # its receive ends, and so does the process
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def call(self, method: str, *arguments: object, **options: object) -> Any:
        """Call a method of `Eager`; BenchError with its message when it fails there."""
        try:
            self._connection.send((method, arguments, options))
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise BenchError(
                f"The process that runs PyTorch has ended (status {self._process.wait(20)}); its message "
                "stands above."
            ) from error
        if isinstance(answer, BenchError):
            raise answer
        return answer

    @property
    def resident_bytes(self) -> int:
        """The memory that the process has resident now."""
        return int(psutil.Process(self._process.pid).memory_info().rss)


def main(descriptor: int, checkpoint: Path, threads: int) -> None:
    """Serve the calls of an `EagerProcess` until it closes the connection."""
    from cosytriton_export.environment import prepare_torch

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    prepare_torch()
    from cosytriton_bench.eager import Eager
    from cosytriton_ensemble.errors import CosytritonError

    connection: Connection[Any, Any] = Connection(descriptor)
    eager = Eager(checkpoint, threads)
    while True:
        try:
            method, arguments, options = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(eager, method)(*arguments, **options))
        except (CosytritonError, ImportError, OSError) as error:
            connection.send(BenchError(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
