"""A program that speaks Triton's protocols over real sockets, with a queue of known service times.

    python fake_triton.py FOLDER --service 0.05 --slots 1

Writes its addresses to FOLDER/addresses.json once it listens, and a line to FOLDER/served.jsonl for each
request: when it came, when its first chunk was sent, by a clock of its own. What it does hangs on its text:
"hang" waits for ever, "fail" fails; values that the real server refuses are refused.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

RATE, CHUNKS, CHUNK_SECONDS = 24_000, 3, 0.2
MODES = (None, "zero_shot", "cross_lingual", "instruct")


class Queue:
    """Requests are served in the order in which they came, `slots` at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.loading: bool = options.loading
        self._slots = threading.Semaphore(options.slots) if options.slots else None
        self._lock = threading.Lock()
        self._log = (options.folder / "served.jsonl").open("w")

    @contextmanager
    def served(self, seed: int) -> Iterator[dict[str, float]]:
        """The block runs after the request's turn and its service time; it may note further times."""
        times = {"came": time.time()}
        seconds = self._options.service
        if self._options.exponential:
            seconds = random.Random(seed).expovariate(1 / seconds)
        if self._slots:
            self._slots.acquire()  # CPython's wakes waiters in their order
        times["began"] = time.time()
        try:
            time.sleep(seconds)
        finally:
            times["worked"] = time.time()
            if self._slots:
                self._slots.release()
        try:
            yield times
        finally:
            with self._lock:
                self._log.write(json.dumps(times) + "\n")
                self._log.flush()


def chunk(index: int) -> dict[str, Any]:
    """10 ms of silence, then a tone."""
    count = round(CHUNK_SECONDS * RATE)
    tone = np.sin(np.arange(count, dtype=np.float32) / 10) / 2
    tone[: RATE // 100] = 0
    return _speech(tone, index * count, "end" if index == CHUNKS - 1 else "")


def _speech(samples: Any, offset: int, reason: str) -> dict[str, Any]:
    return {
        "waveform": samples[None].astype(np.float32),
        "sample_count": np.array([[len(samples)]], np.int32),
        "sample_offset": np.array([[offset]], np.int64),
        "sample_rate": np.array([[RATE]], np.int32),
        "token_count": np.array([[5]], np.int32),
        "finish_reason": np.array([[reason.encode()]], np.object_),
    }


VOICE = {
    "prompt_tokens": np.arange(4, dtype=np.int32)[None],
    "prompt_token_count": np.array([[4]], np.int32),
    "prompt_mel": np.zeros((1, 8, 80), np.float32),
    "prompt_frame_count": np.array([[8]], np.int32),
    "speaker_embedding": np.ones((1, 192), np.float32),
    "checkpoint": np.array([[b"fake"]], np.object_),
}
WHOLE = _speech(np.concatenate([chunk(i)["waveform"][0] for i in range(CHUNKS)]), 0, "end")


def fault(values: dict[str, Any]) -> str:
    """Why the request is refused or fails; "": it is spoken."""
    if not 0.5 <= values.get("speed", 1.0) <= 2 or values.get("max_tokens", 1) < 0:
        return "InputError: a value outside its range"
    if values.get("mode") not in MODES:
        return "InputError: no such mode"
    return "GenerationError: boom" if values["text"] == "fail" else ""


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def ServerLive(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerLiveResponse(live=True)

    def ModelReady(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=not self._queue.loading)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.model_name == "voice_encoder":
            return _response(VOICE, request)
        values = _values(_contents(request))
        if error := fault(values):
            context.abort(grpc.StatusCode.INTERNAL, error)
        with self._queue.served(values["seed"]) as times:
            times["first"] = time.time()
            return _response(WHOLE, request)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        ended = threading.Event()
        context.add_callback(ended.set)
        request = next(requests)
        threading.Thread(target=_drain, args=(requests,), daemon=True).start()
        values = _values(_contents(request))
        if values["text"] == "hang":
            ended.wait()
            return
        if error := fault(values):
            yield service_pb2.ModelStreamInferResponse(error_message=error)
            return
        with self._queue.served(values["seed"]) as times:
            times["first"] = time.time()
            for index in range(CHUNKS):
                yield service_pb2.ModelStreamInferResponse(infer_response=_response(chunk(index), request))
            final = _response({}, request)
            final.parameters["triton_final_response"].bool_param = True
            yield service_pb2.ModelStreamInferResponse(infer_response=final)


def _drain(requests: Any) -> None:
    try:
        for _ in requests:
            pass
    except Exception:  # noqa: BLE001  (how it ends when the stream is cancelled)
        return


def _values(contents: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    """The inputs that decide what happens, from their names and contents."""
    types = {"speed": "<f4", "max_tokens": "<i4", "seed": "<i8"}
    values: dict[str, Any] = {}
    for name, content in contents:
        if name in types:
            values[name] = np.frombuffer(content, types[name])[0].item()
        elif name in ("text", "mode"):
            values[name] = content[4:].decode()
    return values


def _contents(request: Any) -> Iterator[tuple[str, bytes]]:
    names = (tensor.name for tensor in request.inputs)
    return zip(names, request.raw_input_contents, strict=True)


def _content(array: Any) -> bytes:
    return bytes(serialize_byte_tensor(array).item() if array.dtype == np.object_ else array.tobytes())


def _response(tensors: dict[str, Any], request: Any) -> Any:
    answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
    for name, array in tensors.items():
        answer.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        answer.raw_output_contents.append(_content(array))
    return answer


class Handler(BaseHTTPRequestHandler):
    queue: Queue

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(400 if self.queue.loading else 200, b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        model, action = self.path.split("/")[-2:]
        if action == "generate_stream":
            self._stream(json.loads(body))
        elif model == "voice_encoder":
            self._tensors(VOICE)
        else:
            self._speak(self._values(body))

    def _speak(self, values: dict[str, Any]) -> None:
        if error := fault(values):
            return self._send(400, json.dumps({"error": error}).encode())
        with self.queue.served(values["seed"]) as times:
            times["first"] = time.time()
            return self._tensors(WHOLE)

    def _values(self, body: bytes) -> dict[str, Any]:
        rest = int(self.headers["Inference-Header-Content-Length"])
        contents = []
        inputs = json.loads(body[:rest])["inputs"]
        for tensor in inputs:
            size = tensor["parameters"]["binary_data_size"]
            contents.append((tensor["name"], body[rest : rest + size]))
            rest += size
        return _values(contents)

    def _stream(self, values: dict[str, Any]) -> None:
        if error := fault(values):
            return self._send(400, json.dumps({"error": error}).encode())
        if values["text"] == "hang":
            threading.Event().wait()
        with suppress(ConnectionError), self.queue.served(values["seed"]) as times:  # a listener may leave
            times["first"] = time.time()
            self.send_response(200)
            self.end_headers()
            for index in range(CHUNKS):
                plain = {name: _plain(array) for name, array in chunk(index).items()}
                self.wfile.write(
                    b"data: " + json.dumps({"model_name": "tts_stream", **plain}).encode() + b"\n\n"
                )
        return None

    def _tensors(self, tensors: dict[str, Any]) -> None:
        described = [
            {
                "name": name,
                "datatype": np_to_triton_dtype(array.dtype),
                "shape": array.shape,
                "parameters": {"binary_data_size": len(_content(array))},
            }
            for name, array in tensors.items()
        ]
        head = json.dumps({"outputs": described}).encode()
        self._send(200, head + b"".join(map(_content, tensors.values())), len(head))

    def _send(self, status: int, data: bytes, head: int | None = None) -> None:
        self.send_response(status)
        if head is not None:
            self.send_header("Inference-Header-Content-Length", str(head))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _plain(array: Any) -> Any:
    values = [v.decode() if isinstance(v, bytes) else v for v in array.ravel().tolist()]
    return values[0] if len(values) == 1 else values


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--service", type=float, default=0.02, help="mean seconds of work for a request")
    parser.add_argument("--exponential", action="store_true", help="service times are, by the request's seed")
    parser.add_argument("--slots", type=int, default=0, help="requests that are worked on at a time; 0: all")
    parser.add_argument("--loading", action="store_true", help="say that no model is ready yet")
    options = parser.parse_args()
    queue = Queue(options)
    server = grpc.server(ThreadPoolExecutor(256))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(queue), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    web = ThreadingHTTPServer(("127.0.0.1", 0), type("WithQueue", (Handler,), {"queue": queue}))
    addresses = {"url": f"127.0.0.1:{port}", "http_url": f"http://127.0.0.1:{web.server_port}"}
    part = options.folder / "addresses.part"
    part.write_text(json.dumps(addresses))
    part.rename(options.folder / "addresses.json")
    web.serve_forever()


if __name__ == "__main__":
    main()
