"""Runs a function on N real processes that form a gloo process group."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "lightning_compress", "pytorch_lightning", "tests.ranks", "tests.warm"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Calls ``function(*args)`` on every rank and returns what each returned, in rank order.

    ``function`` must be a module-level function. An exception on any rank is raised here with its traceback.
    """
    pickled = pickle.dumps(args)  # tensors sent as objects would be one memory for all ranks
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _context.Process(
                target=_serve, args=(function, rank, world_size, pickled, folder, pipes[rank][1]), daemon=True
            )
            for rank in range(world_size)
        ]
        for process, (_, end) in zip(processes, pipes, strict=True):
            process.start()
            end.close()  # ours: a rank that dies without a word is noticed at once
        try:
            return [_receive(pipe, rank, timeout) for rank, (pipe, _) in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()


def _receive(pipe: Any, rank: int, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise TimeoutError(f"rank {rank} gave no result within {timeout} s")
    try:
        error, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a result") from None
    if error is not None:
        raise AssertionError(f"rank {rank} failed:\n{error}")
    return result


def _serve(function: Callable[..., Any], rank: int, world_size: int, args: bytes, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = Path(folder) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = function(*pickle.loads(args))
        dist.barrier()  # nobody leaves while others still read from it
        dist.destroy_process_group()
        answer = (None, result)
    except BaseException:
        answer = (traceback.format_exc(), None)
    # pickled here: tensors sent as objects would share memory with a process that is about to end
    pipe.send_bytes(pickle.dumps(answer))
