"""Input files of perf_analyzer: as the stages declare them, and as the running server takes them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from cosytriton_ensemble.errors import RepositoryError
from cosytriton_ensemble.families import COSYVOICE2
from cosytriton_ensemble.pipeline import pipeline_of
from cosytriton_ensemble.protocol import UNLIMITED, request_message, response_tensors
from cosytriton_ensemble.spec import Dim
from cosytriton_loadtests.errors import LoadTestError
from cosytriton_loadtests.perf_analyzer import SCRIPT, read_feed, write_inputs

STAGES = pipeline_of(COSYVOICE2).native_stages


def test_each_native_stage_has_a_file_of_what_it_declares(demo_repository: Path, tmp_path: Path) -> None:
    written = write_inputs(demo_repository, tmp_path, feeds=3)
    assert [one.stage.name for one in written] == [stage.name for stage in STAGES]
    for one in written:
        requests = json.loads(one.file.read_text())["data"]
        assert len(requests) == 3
        assert requests[0] != requests[1]
        for request in requests:
            assert set(request) == {tensor.name for tensor in one.stage.inputs}
            feed = read_feed(one.stage, request)
            for tensor in one.stage.inputs:
                shape = request[tensor.name]["shape"]
                assert feed[tensor.name].dtype == tensor.numpy_type
                assert len(shape) == len(tensor.dims)
                for extent, dim in zip(shape, tensor.dims, strict=True):
                    assert dim.min <= extent <= dim.max if isinstance(dim, Dim) else extent == dim


def test_the_command_line_sends_the_file_to_the_stage(demo_repository: Path, tmp_path: Path) -> None:
    written = write_inputs(demo_repository, tmp_path / "new", "example.org:9001")
    for one in written:
        words = shlex.split(one.command)
        given = dict(zip(words[1::2], words[2::2], strict=True))
        assert words[0] == "perf_analyzer"
        assert (given["-m"], given["-u"], given["-i"]) == (one.stage.name, "example.org:9001", "grpc")
        assert (tmp_path / "new" / given["--input-data"]) == one.file
    script = (tmp_path / "new" / SCRIPT).read_text()
    assert all(one.command in script for one in written)
    assert script.count("response cache") == sum(stage.cached for stage in STAGES)


def test_bad_input_is_named(demo_repository: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="feeds = 0"):
        write_inputs(demo_repository, tmp_path, feeds=0)
    with pytest.raises(RepositoryError):
        write_inputs(tmp_path / "nowhere", tmp_path)


def test_the_server_takes_what_the_files_hold(server: Any, demo_repository: Path, tmp_path: Path) -> None:
    with grpc.insecure_channel(server.grpc_url, UNLIMITED) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for one in write_inputs(demo_repository, tmp_path, size="min", feeds=1):
            (request,) = json.loads(one.file.read_text())["data"]
            message = request_message(one.stage.name, read_feed(one.stage, request), "perf")
            outputs = response_tensors(stub.ModelInfer(message))
            assert set(outputs) == {tensor.name for tensor in one.stage.outputs}
