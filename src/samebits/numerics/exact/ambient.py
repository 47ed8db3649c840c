"""Guard for a forward pass against time, host and threads, on which no result of ``exact`` may depend.

A process that computes in ``exact`` replaces functions of Python and PyTorch once. Outside a guarded pass the
replacements answer as before. Inside they refuse by name, or give the answer for one process on one device, so that a
model that only asks whether it is alone runs unchanged.
"""

from __future__ import annotations

import _thread
import functools
import os
import platform
import random
import resource
import socket
import sys
import threading
import time
from contextlib import contextmanager
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch

from samebits.errors import RefusedError
from samebits.numerics.exact.functions import replace_apply
from samebits.numerics.exact.switches import switched, switches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from samebits.numerics.exact.engine import Engine

_HINT = "give it to the factory as a number in model.kwargs, or set train.numerics: [fast]"
_RESTARTS = "restarts draws, which exact makes anew from seed, step and shard"
_DRAWN_ONCE = "draw once and use it twice, draw in the factory into a buffer, or set train.numerics: [fast]"
_SEEDED: dict[ModuleType, str] = {
    torch: "manual_seed set_rng_state",
    torch.random: "manual_seed set_rng_state fork_rng",
    torch.cuda: "manual_seed manual_seed_all set_rng_state set_rng_state_all",
}
"""They would have no effect on draws, which follow the seed of params.yaml, the step and the shard."""
_REFUSED: dict[ModuleType, str] = {
    time: "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns thread_time",
    os: "getpid getppid urandom getrandom getloadavg times uname",
    random: "_urandom",
    socket: "gethostname getfqdn",
    platform: "node machine processor platform system release version uname",
    threading: "get_ident get_native_id",
    resource: "getrusage",
    torch: "seed",
    torch.cuda: "is_available device_count get_device_name get_device_capability mem_get_info memory_allocated",
}
_ANSWERED: dict[ModuleType, dict[str, object]] = {
    os: {"cpu_count": 1, "sched_getaffinity": {0}},
    torch: {"get_num_threads": 1, "get_num_interop_threads": 1, "initial_seed": 0},
    torch.backends.cpu: {"get_cpu_capability": "DEFAULT"},
    sys.modules[torch._C._get_cpu_capability.__module__]: {torch._C._get_cpu_capability.__name__: "DEFAULT"},
    torch.distributed: {"is_initialized": False, "get_rank": 0, "get_world_size": 1},
}
_STARTS = ("start_new_thread", "start_joinable_thread")
_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_THE_KIT = {"torch", "samebits", "threading", "concurrent", "multiprocessing", "logging", "linecache", "traceback",
               "warnings", "inspect"}  # fmt: skip


class _Guard(threading.local):
    engine: Engine | None = None
    builds = False


_GUARD = _Guard()


@contextmanager
def guarded(engine: Engine | None, *, builds: bool = False) -> Iterator[None]:
    """Context for a user's code, whose operations ``engine`` sees; with ``builds`` most questions are answered.

    ``guarded(None)``, or ``unguarded()``, is the context for this library's own code within a guarded block.
    """
    before = _GUARD.engine, _GUARD.builds
    _GUARD.engine, _GUARD.builds = engine, builds
    try:
        yield
    finally:
        _GUARD.engine, _GUARD.builds = before


unguarded = functools.partial(guarded, None)


@functools.cache
def guard_process() -> None:
    """Replace the functions for the life of this process, and hide the rank that its environment names."""
    for refused, what, hint in ((_REFUSED, "is asked for", _HINT), (_SEEDED, _RESTARTS, _DRAWN_ONCE)):
        for module, functions in refused.items():
            for function in functions.split():
                _replace(module, function, what=what, hint=hint)
    for module, answers in _ANSWERED.items():
        for function, answer in answers.items():
            _replace(module, function, lambda answer=answer: answer)  # type: ignore[misc]
    for name in _RANKS:
        if name in os.environ:
            os.environ[name] = "1" if name.endswith("SIZE") else "0"
    for module in (_thread, threading):
        for start in (name for name in dir(module) if name.strip("_") in _STARTS):
            _forbid(module, start, "a thread is started, in which nothing is looked at", "do it in this thread")
    text = "torch.cond: control flow as an operation is not looked into"
    _forbid(torch, "cond", text, "use Python's own, or set train.numerics: [fast]")
    sys.addaudithook(_hear_of_processes)
    replace_apply()


def _forbid(module: ModuleType, name: str, what: str, hint: str) -> None:
    """Refuse a function in a guarded block, also while a model is built."""
    function = getattr(module, name)

    @functools.wraps(function)
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        if _GUARD.engine is not None:
            _refuse(what, hint)
        return function(*args, **kwargs)

    setattr(module, name, forbidden)


def _replace(
    module: ModuleType, name: str, answer: Callable[[], object] | None = None, *, what: str = "", hint: str = ""
) -> None:
    """Replace a function of a module: in a guarded block it returns ``answer()``, or is refused without one."""
    function = getattr(module, name, None)
    if function is None:  # not on this system
        return

    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if _GUARD.engine is not None and (answer or not _GUARD.builds) and not _asked_by_the_kit():
            if answer is not None:
                return answer()
            _refuse(f"{module.__name__}.{name.lstrip('_')} {what}", hint)
        return function(*args, **kwargs)

    setattr(module, name, stand_in)


def _hear_of_processes(event: str, arguments: tuple[object, ...]) -> None:
    if _GUARD.engine is None or _GUARD.builds:
        return
    if event in {"subprocess.Popen", "os.fork", "os.posix_spawn"}:
        _refuse("a process is started", "do it before the training")
    if event in {"gc.get_objects", "gc.get_referrers"} and not _asked_by_the_kit():
        _refuse(f"{event} is asked for", _HINT)
    if event in {"os.listdir", "os.scandir"} and not _asked_by_the_kit():
        _refuse(f"{arguments[0] or 'the folder'} is listed", "list it in the factory")
    writes = (
        event == "open" and isinstance(arguments[1], str) and {*"wax"} & {*arguments[1]} and "+" not in arguments[1]
    )
    if event == "open" and not writes and not _asked_by_the_kit():
        of_system = str(arguments[0]).startswith(("/proc/", "/sys/"))
        _refuse(f"{arguments[0]} is read", _HINT if of_system else "read it in the factory, and keep it in a buffer")


def _asked_by_the_kit() -> bool:
    """Whether the caller is PyTorch, a warning, or the import of a library at its first use."""
    nearest = ""  # module on the stack outside the rest of Python's library
    for frame, _ in walk_stack(sys._getframe(2)):
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        if not nearest and (name in _OF_THE_KIT or name not in sys.stdlib_module_names):
            nearest = name
    return nearest in _OF_THE_KIT


def _refuse(what: str, hint: str) -> None:
    engine = _GUARD.engine
    assert engine is not None
    engine.refuse(engine.refusal(what, hint))


def threads() -> set[str]:
    """Names of Python's threads except the current one."""
    return {thread.name for thread in threading.enumerate() if thread is not threading.current_thread()}


@contextmanager
def building(engine: Engine) -> Iterator[None]:
    """Context for a factory, whose refusals are the engine's; it may leave no thread and no changed switch behind."""
    running, before = threads(), switches()
    with engine, guarded(engine, builds=True):
        yield
    if left := sorted(threads() - running):
        why = f"the factory leaves a thread running ({left[0]}), in which nothing is looked at"
        hint = "end it before the factory returns, or set train.numerics: [fast]"
        engine.refuse(RefusedError(why, hint=hint))
    if name := switched(before):
        hint = "leave it as it was, or set train.numerics: [fast]"
        engine.refuse(RefusedError(f"the factory changes a switch of PyTorch's: {name}", hint=hint))
