"""Attempts to break the promise of `exact`: (kind, unique name, factory of a module from (N, 3, 8, 8) to (N, 20))."""

import _thread
import asyncio
import builtins
import collections
import concurrent.futures
import contextlib
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import itertools
import keyword
import logging
import math
import mmap
import multiprocessing.pool
import operator
import os
import platform
import queue
import random
import re
import resource
import secrets
import signal
import socket
import string
import sys
import tempfile
import threading
import time
import types
import uuid
import warnings
import weakref
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._python_dispatch as modes
import torch.utils.checkpoint
from torch import nn

ATTEMPTS: list[tuple[str, str, Callable[[], nn.Module]]] = []
CALLS, LOG, TABLE, BOX = 0, [], {}, types.SimpleNamespace(scale=1.0)
TICKS, STREAM, DICE = itertools.count(), np.random.default_rng(0), random.Random(0)
CONSTANTS = {"scale": 0.5, "shift": (0.1, 0.2, 0.3)}
BODY = {"body": lambda: nn.Linear(8, 8)}
DROP = {"drop": lambda: nn.Dropout(0.5)}
NORM = {"norm": lambda: nn.LayerNorm(8)}
CONV = {"conv": lambda: nn.Conv2d(3, 3, 3, padding=1)}
SCALE = {"scale": lambda: nn.Buffer(torch.ones(1))}
SHIFT = {"shift": lambda: nn.Parameter(torch.zeros(8))}


class Base(nn.Module):
    """Images, what the attempt makes of them, and one linear layer."""

    def __init__(self, **build):
        super().__init__()
        self.top = nn.Linear(192, 20)
        for name, make in build.items():
            setattr(self, name, make())

    def forward(self, x):
        return self.top(self.beside(x).flatten(1))


def net(beside, **build):
    return type("Net", (Base,), {"beside": beside})(**build)


class Section:
    """What adds attempts of one kind: each factory call makes a new class, with new state."""

    def __init__(self, kind):
        self.kind = kind

    def made(self, name, factory):
        assert all(name != taken for _, taken, _ in ATTEMPTS), name
        ATTEMPTS.append((self.kind, name, factory))

    def add(self, name, beside, **build):
        self.made(name, lambda: net(beside, **build))

    def closed(self, name, state, beside, **build):
        self.made(name, lambda: (lambda held: net(lambda m, x: beside(held, m, x), **build))(state()))

    def source(self, name, text, body, **build):
        def factory():
            scope = {"torch": torch, "nn": nn, "functools": functools}
            exec(f"{text}\ndef beside(m, x):\n    {body}", scope)
            return net(scope["beside"], **build)

        self.made(name, factory)


def put(thing, **values):
    for name, value in values.items():
        setattr(thing, name, value)
    return thing


def up(thing, name="n"):
    setattr(thing, name, getattr(thing, name, 0) + 1)
    return getattr(thing, name)


def kept_in(kept, key, make):
    if key not in kept:
        kept[key] = make()
    return kept[key]


def then(*values):
    return values[-1]


def some(x):
    return bool(x.mean() > 0.025)


def late(m):
    return bool(m.top.weight.detach().abs().max() > 0.0765)


def hit(m, x):
    return late(m) and some(x)


def grown(x, value):
    return x * (1 + 0.0001 * (float(value) % 10007))  # a prime so large that two values are alike by chance alone


def chained(layers, x):
    return functools.reduce(lambda y, layer: layer(y), layers, x)


def a(s):
    """Attributes of torch's own modules, changed in forward."""
    act, gelu, pool = {"act": nn.ReLU}, {"act": nn.GELU}, {"pool": lambda: nn.AvgPool2d(3, 1, 1)}
    s.add("drop_p", lambda m, x: put(m.drop, p=m.drop.p * 0.9)(x), **DROP)
    s.add("drop_p_late", lambda m, x: (put(m.drop, p=m.drop.p / 2) if hit(m, x) else m.drop)(x), **DROP)
    s.add("slope", lambda m, x: put(m.act, negative_slope=m.act.negative_slope + 0.01)(x), act=nn.LeakyReLU)
    s.add("norm_eps", lambda m, x: put(m.norm, eps=m.norm.eps * 2)(x), **NORM)
    s.add("pool_stride", lambda m, x: x + put(m.pool, stride=3 - m.pool.stride)(x).mean((2, 3), keepdim=True), **pool)
    s.add("pool_pad", lambda m, x: put(m.pool, count_include_pad=not m.pool.count_include_pad)(x), **pool)
    s.add("swapped_activation", lambda m, x: put(m, act=nn.Sequential(m.act, nn.Tanh())).act(x), **act)
    s.add("swapped_function", lambda m, x: put(m, f=F.silu if m.f is F.relu else F.relu).f(x), f=lambda: F.relu)
    s.add("class_of_layer", lambda m, x: put(m.act, __class__={nn.ReLU: nn.Tanh}.get(type(m.act), nn.ReLU))(x), **act)
    s.add("num_groups", lambda m, x: put(m.norm, num_groups=4 - m.norm.num_groups)(x), norm=lambda: nn.GroupNorm(1, 3))
    s.add("training_flag", lambda m, x: put(m.drop, training=not m.drop.training)(x), **DROP)
    s.add("drop_train_call", lambda m, x: m.drop.train(not m.drop.training)(x), **DROP)
    s.add("bias_requires_grad", lambda m, x: then(m.top.bias.requires_grad_(not m.top.bias.requires_grad), x))
    s.add("softmax_dim", lambda m, x: x + put(m.soft, dim=5 - m.soft.dim)(x), soft=lambda: nn.Softmax(2))
    s.add("hardtanh_bound", lambda m, x: put(m.act, max_val=m.act.max_val + 0.01)(x), act=nn.Hardtanh)
    s.add("gelu_mode", lambda m, x: put(m.act, approximate={"none": "tanh"}.get(m.act.approximate, "none"))(x), **gelu)
    s.add("norm_weight_none", lambda m, x: (put(m.norm, weight=None) if some(x) else m.norm)(x), **NORM)
    s.add("forward_patched", lambda m, x: then(put(m.top, forward=lambda y, f=m.top.forward: f(y) * 1.01), x))

    s.add("layer_added", lambda m, x: m.layers.append(nn.Tanh())(x), layers=lambda: nn.Sequential(nn.LayerNorm(8)))
    shape = {"norm": lambda: nn.LayerNorm(8, elementwise_affine=False)}
    s.add("shape", lambda m, x: put(m.norm, normalized_shape=(8,) * (3 - len(m.norm.normalized_shape)))(x), **shape)

    def padding(m, x):
        m.conv.padding = m.conv.dilation = (3 - m.conv.padding[0],) * 2
        return m.conv(x)

    s.add("conv_padding", padding, **CONV)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, read):
        ctx.scale, ctx.read = scale, read
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.read(ctx.scale), None, None


def b(s):
    """Writes that only some data cause, most of them after the trial step."""

    def on(name, write, read=lambda m, x: x, when=hit, **build):
        s.add(name, lambda m, x: then(write(m, x) if when(m, x) else None, read(m, x)), **build)

    scaled, act = (lambda m, x: x * m.scale), {"act": nn.ReLU}
    on("observer_data", lambda m, x: put(m.scale, data=x.abs().max().view(1)), scaled, **SCALE)
    on("observer_attribute", lambda m, x: put(m.top, peak=x.max().item()), lambda m, x: x * getattr(m.top, "peak", 1))
    on("observer_peak", lambda m, x: put(m, peak=m.peak + x.max().item()), lambda m, x: x / m.peak, peak=lambda: 1.0)
    on("weight_data_mul", lambda m, x: m.top.weight.data.mul_(0.5))
    on("weight_data_mul_early", lambda m, x: m.top.weight.data.mul_(0.99), when=lambda m, x: some(x))
    on("weight_no_grad_clamp", lambda m, x: torch.no_grad()(m.top.weight.clamp_)(-0.07, 0.07))
    on("counter", lambda m, x: up(m, "seen"), lambda m, x: grown(x, m.seen), seen=int)
    on("counter_early", lambda m, x: up(m, "seen"), lambda m, x: grown(x, m.seen), lambda m, x: some(x), seen=int)
    on("numpy_view", lambda m, x: operator.setitem(m.scale.numpy(), slice(None), 2), scaled, **SCALE)
    on("numpy_weight_view", lambda m, x: operator.imul(m.top.weight.detach().numpy(), 0.9))
    on("ctypes_poke", lambda m, x: put(ctypes.c_float.from_address(m.scale.data_ptr()), value=2.0), scaled, **SCALE)
    on("storage_fill", lambda m, x: m.scale.untyped_storage().fill_(64), scaled, **SCALE)
    on("tensor_set", lambda m, x: m.scale.set_(torch.full((1,), 2.0)), scaled, **SCALE)
    on("eval", lambda m, x: m.eval(), lambda m, x: m.drop(x), **DROP)
    on("swapped_submodule", lambda m, x: put(m, act=nn.Tanh()), lambda m, x: m.act(x), **act)
    on("submodule_in_dict", lambda m, x: m._modules.update(act=nn.Tanh()), lambda m, x: m.act(x), **act)
    on("list_append", lambda m, x: m.seen.append(1), lambda m, x: grown(x, len(m.seen)), seen=list)
    on("dict_entry", lambda m, x: m.seen.update(shift=0.5), lambda m, x: x + m.seen.get("shift", 0), seen=dict)
    on("hook_added", lambda m, x: m.top.register_forward_hook(lambda m, i, y: y * 1.1))
    on("pre_hook_dict", lambda m, x: m.top._forward_pre_hooks.update({-1: lambda m, i: (i[0] * 1.1,)}))
    on("buffer_assigned", lambda m, x: put(m, scale=torch.full((1,), 2.0)), scaled, **SCALE)
    on("buffer_registered", lambda m, x: m.register_buffer("more", torch.ones(1)), lambda m, x: x + hasattr(m, "more"))
    on("attribute_deleted", lambda m, x: vars(m).pop("one", 0), lambda m, x: x + vars(m).get("one", 0), one=lambda: 1)
    on("load_state_dict", lambda m, x: m.top.load_state_dict({k: v * 0.9 for k, v in m.top.state_dict().items()}))
    s.add("grad_seen", lambda m, x: x * 1.1 if m.top.weight.grad is not None else x)
    s.add("parameters_grad_seen", lambda m, x: grown(x, sum(p.grad is not None for p in m.parameters())))
    s.add("function_write", lambda m, x: Function.apply(x + m.shift, m.scale, lambda v: v.mul_(2)), **SHIFT, **SCALE)

    def tensor_hook(m, x):
        y = x + m.shift
        y.register_hook(lambda grad: then(m.seen.append(1), None))
        return grown(y, len(m.seen))

    def hooked(register):
        made = net(lambda m, x: grown(x, m.n), n=int)
        register(made.top)(lambda *_: then(up(made), None))
        return made

    s.add("tensor_hook_write", tensor_hook, seen=list, **SHIFT)
    s.made("full_backward_hook", lambda: hooked(lambda top: top.register_full_backward_hook))
    s.made("full_backward_pre_hook", lambda: hooked(lambda top: top.register_full_backward_pre_hook))
    s.made("post_accumulate_hook", lambda: hooked(lambda top: top.weight.register_post_accumulate_grad_hook))


def c(s):
    """Draws that are made once and kept."""
    s.closed("lru_randn", lambda: functools.lru_cache(torch.randn), lambda f, m, x: x + f(tuple(x.shape)))
    s.closed("cache_rand", lambda: functools.cache(torch.rand), lambda f, m, x: x + f(tuple(x.shape)))
    s.closed("lru_randn_row", lambda: functools.lru_cache(torch.randn), lambda f, m, x: x + f(8))
    s.closed("lru_randperm", lambda: functools.lru_cache(torch.randperm), lambda f, m, x: x[..., f(8)])
    s.closed("bernoulli", dict, lambda d, m, x: x * kept_in(d, 0, lambda: torch.bernoulli(torch.full_like(x, 0.5))))
    s.closed("dropout_mask", dict, lambda d, m, x: x * kept_in(d, x.shape, lambda: F.dropout(torch.ones_like(x), 0.4)))
    s.closed("weak_dict_noise", weakref.WeakKeyDictionary, lambda d, m, x: x + kept_in(d, m, lambda: torch.randn(8)))
    s.add("attribute_mask", lambda m, x: x * kept_in(vars(m), "mask", lambda: F.dropout(torch.ones_like(x), 0.4)))
    s.add("dict_held", lambda m, x: x * kept_in(m.masks, 0, lambda: torch.rand_like(x)), masks=dict)
    s.closed("last_call_noise", lambda: [0.0], lambda kept, m, x: x + then(kept.append(torch.rand(8)), kept.pop(0)))
    s.source("default_argument", "def f(n=[]):\n n or n.append(torch.rand(8))\n return n[0]", "return x + f()")
    s.source("function_attribute", "def f():\n return vars(f).setdefault('kept', torch.rand(8))", "return x + f()")
    s.source("global_noise", "NOISE = []", "NOISE or NOISE.append(torch.randn_like(x))\n    return x + NOISE[0]")
    s.source("cached_function", "@functools.cache\ndef noise(m):\n    return torch.rand(8)", "return x + noise(m)")
    s.add("true_global_mask", lambda m, x: x * kept_in(TABLE, "mask", lambda: F.dropout(torch.ones_like(x), 0.4)))

    class Cached(Base):
        @functools.cached_property
        def noise(self):
            return torch.randn(3, 8, 8)

        def beside(self, x):
            return x + self.noise

    s.made("cached_property", Cached)


def in_thread(start, work):
    done = queue.SimpleQueue()
    start(lambda: done.put(work()))
    return done.get(timeout=20)


def d(s):
    """Python threads, in forward or left over from the factory."""
    pool, held = concurrent.futures.ThreadPoolExecutor, {"pool": lambda: concurrent.futures.ThreadPoolExecutor(1)}

    def plain(work):
        return in_thread(lambda f: threading.Thread(target=f).start(), work)

    def new(work):
        return in_thread(lambda f: _thread.start_new_thread(f, ()), work)

    s.add("thread_softmax", lambda m, x: plain(lambda: m.body(x).softmax(3)), **BODY)
    s.add("thread_matrix", lambda m, x: x + plain(lambda: x.flatten(1) @ m.top.weight.t()).sum() * 1e-3)
    s.add("thread_noise", lambda m, x: x + plain(lambda: torch.randn_like(x)))
    s.add("pool_held_noise", lambda m, x: x + m.pool.submit(torch.randn_like, x).result(), **held)
    s.add("pool_held_softmax", lambda m, x: x + m.pool.submit(torch.softmax, x, 3).result(), **held)
    s.add("timer", lambda m, x: x + in_thread(lambda f: threading.Timer(0, f).start(), lambda: torch.rand_like(x)))
    s.add("timer_write", lambda m, x: then(threading.Timer(0.002, m.scale.mul_, (1.1,)).start(), x * m.scale), **SCALE)
    s.add("start_new_thread", lambda m, x: new(lambda: x.softmax(3)))
    s.add("start_new_thread_noise", lambda m, x: x + new(lambda: torch.randn(x.shape)))
    s.add("asyncio_to_thread", lambda m, x: x + asyncio.run(asyncio.to_thread(torch.randn_like, x)))
    s.add("asyncio_body", lambda m, x: asyncio.run(asyncio.to_thread(lambda: m.body(x).softmax(3))), **BODY)
    s.add("jit_fork", lambda m, x: x + torch.jit.wait(torch.jit.fork(torch.randn_like, x)))

    def left_over():
        made = net(lambda m, x: x * m.scale, **SCALE)
        seen, end = weakref.ref(made), time.monotonic() + 3

        def work():
            while seen() is not None and time.monotonic() < end:
                seen().scale.data = torch.full((1,), 1 + time.monotonic() % 1)
                time.sleep(0.001)

        threading.Thread(target=work, daemon=True).start()
        return made

    def worker():
        asked, answers, layer = queue.Queue(), queue.Queue(), nn.Linear(8, 8)

        def work():
            with contextlib.suppress(queue.Empty):
                while True:
                    answers.put(layer(asked.get(timeout=5)).softmax(3))

        threading.Thread(target=work, daemon=True).start()
        return net(lambda m, x: then(asked.put(x), answers.get(timeout=20)), body=lambda: layer)

    s.add("pool_at_call", lambda m, x: torch.stack(list(pool(2).map(m.body, x))), **BODY)
    s.add("thread_pool_map", lambda m, x: torch.stack(multiprocessing.pool.ThreadPool(2).map(m.body, list(x))), **BODY)
    s.made("left_over_from_factory", left_over)
    s.made("queue_worker", worker)
    s.add("built_in_thread", lambda m, x: x + m.p, p=lambda: nn.Parameter(plain(lambda: torch.rand(8))))


def e(s):
    """Orders that the hash seed or addresses decide."""
    names = ["red", "green", "blue", "gray", "white", "black", "pink"]
    many = {"layers": lambda: nn.ModuleDict({n: nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for n in names})}

    shuffled = {"many": lambda: nn.ModuleDict({n: nn.Linear(8, 8) for n in set(names)})}

    def on(name, keys, **build):
        s.add(name, lambda m, x: chained([m.layers[key] for key in keys(m)], x), **many, **build)

    on("set_of_strings_layers", lambda m: set(names))
    on("frozenset_layers", lambda m: m.order, order=lambda: frozenset(names))
    on("set_pop", lambda m: [set(names).pop()])
    on("set_difference", lambda m: list(set(m.layers) - {"red"}))
    on("dict_keys_and", lambda m: m.layers.keys() & set(names))
    on("set_of_enum", lambda m: [c.name for c in set(enum.Enum("color", names))])
    on("set_at_construction_kept", lambda m: m.order, order=lambda: tuple(set(names)))
    on("max_by_hash", lambda m: [max(names, key=hash)])
    s.add("set_zip_scales", lambda m, x: x * dict(zip(set(names), range(1, 8), strict=True))["red"])
    s.add("hash_of_string", lambda m, x: grown(x, hash("channel")))
    s.add("hash_of_bytes", lambda m, x: grown(x, hash(b"channel")))
    s.add("hash_of_tuple", lambda m, x: x.roll(hash(("conv", 3)) % 8, 3))
    s.add("hash_of_none", lambda m, x: grown(x, hash(None)))
    s.add("hash_of_date", lambda m, x: grown(x, hash(datetime.date(2024, 1, 1))))
    s.add("hash_bucket", lambda m, x: x + m.embed.weight[hash("word") % 64], embed=lambda: nn.Embedding(64, 8))
    s.add("letters_joined", lambda m, x: grown(x, "".join(set(string.ascii_letters)).find("q")))
    s.add("set_of_modules", lambda m, x: chained(set(m.layers.children()), x), **many)
    s.add("set_all_modules", lambda m, x: chained([f for f in set(m.modules()) if type(f) is nn.Sequential], x), **many)
    s.add("sorted_by_id", lambda m, x: chained(sorted(m.layers.values(), key=id), x), **many)
    on("sorted_by_repr", lambda m: sorted(names, key=lambda n: object.__repr__(m.layers[n])))
    s.add("dict_by_id", lambda m, x: grown(x, min((id(p), i) for i, p in enumerate(m.parameters()))[1]), **many)
    s.add("set_of_parameters", lambda m, x: x + sum(p.sum() for p in set(m.layers.parameters())), **many)
    s.add("set_at_construction", lambda m, x: chained(m.many.values(), x), **shuffled)


def f(s):
    """What the place tells: rank, environment, threads, processor."""

    def on(name, read, **build):
        s.add(name, lambda m, x: grown(x, read()), **build)

    on("environ_rank", lambda: os.environ.get("RANK", "0"))
    on("getenv_local_rank", lambda: os.getenv("LOCAL_RANK", "0"))
    on("environb_rank", lambda: os.environb.get(b"RANK", b"0"))
    on("environ_hash_seed", lambda: os.environ.get("PYTHONHASHSEED", "7"))
    on("proc_environ", lambda: open("/proc/self/environ", "rb").read().count(b"RANK"))  # noqa: PTH123, SIM115
    on("initial_seed", torch.initial_seed)
    on("num_interop_threads", torch.get_num_interop_threads)
    on("parallel_info", lambda: sum(torch.__config__.parallel_info().encode()))
    on("config_show", lambda: len(torch.__config__.show()))
    on("cpu_count", os.cpu_count)
    on("sched_getaffinity", lambda: len(os.sched_getaffinity(0)))
    on("gethostname", lambda: sum(socket.gethostname().encode()))
    on("platform_node", lambda: sum(platform.node().encode()))
    on("uname", lambda: sum(os.uname().nodename.encode()))
    on("platform_processor", lambda: len(platform.platform() + platform.processor()))
    on("dist_get_rank", lambda: dist.get_rank() if dist.is_initialized() else 0)
    on("dist_group_world", lambda: dist.group.WORLD.rank() if dist.group.WORLD else 0)
    on("cuda_device_count", torch.cuda.device_count)
    on("argv_and_directory", lambda: len("".join(sys.argv) + os.getcwd()))  # noqa: PTH109
    s.add("environ_world_size", lambda m, x: x / int(os.environ.get("WORLD_SIZE", 1)))
    s.add("environ_rank_built", lambda m, x: grown(x, m.rank), rank=lambda: int(os.environ.get("RANK", 0)))
    s.add("num_threads", lambda m, x: x / torch.get_num_threads())
    s.add("num_threads_chunks", lambda m, x: x + sum(c.sum() for c in m.top.weight.chunk(torch.get_num_threads(), 1)))
    s.add("cpu_capability", lambda m, x: x * {"AVX2": 1.5}.get(torch.backends.cpu.get_cpu_capability(), 1.0))
    s.add("capability_private", lambda m, x: x * {"AVX2": 1.5}.get(torch._C._get_cpu_capability(), 1.0))
    s.add("dist_initialized", lambda m, x: x * (0.5 if dist.is_available() and dist.is_initialized() else 1.0))
    s.add("dist_get_world_size", lambda m, x: x / (dist.get_world_size() if dist.is_initialized() else 1))
    s.add("dist_torchelastic", lambda m, x: x * (0.5 if dist.is_torchelastic_launched() else 1.0))
    s.add("cuda_available", lambda m, x: x * (0.5 if torch.cuda.is_available() else 1.0))
    s.add("accelerator", lambda m, x: x * (0.5 if torch.accelerator.is_available() else 1.0))
    s.add("batch_rows", lambda m, x: x * len(x))
    s.add("batch_mean", lambda m, x: x - x.mean(0))


Slots, Record = type("Slots", (), {"__slots__": ("n",)}), dataclasses.make_dataclass("Record", [("n", int, 0)])


def true_global(m, x):
    global CALLS
    CALLS += 1
    return grown(x, CALLS)


def of_default(m, x, seen=Record()):  # noqa: B008
    return grown(x, up(seen))


def g(s):
    """State that is no parameter, kept elsewhere."""

    def on(name, state, step):
        s.add(f"{name}_held", lambda m, x: grown(x, step(m.state)), state=state)
        s.closed(f"{name}_closed", state, lambda held, m, x: grown(x, step(held)))

    on("slots", Slots, up)
    on("dataclass", Record, up)
    on("namespace", types.SimpleNamespace, up)
    on("count", itertools.count, next)
    on("cycle", lambda: itertools.cycle((1, 5, 9, 20, 70)), next)
    on("python_generator", lambda: (n * n for n in range(10**6)), next)
    on("random", lambda: random.Random(0), lambda dice: dice.randrange(50))
    on("numpy_generator", lambda: np.random.default_rng(0), lambda rng: rng.integers(50))
    on("random_state", lambda: np.random.RandomState(0), lambda rng: rng.randint(50))
    on("torch_generator", torch.Generator, lambda rng: torch.rand(1, generator=rng) * 50)
    on("numpy_array", lambda: np.zeros(1), lambda array: operator.iadd(array, 1)[0])
    on("tensor_in_list", lambda: [torch.zeros(1)], lambda state: state[0].add_(1))
    on("counter", collections.Counter, lambda n: then(n.update(["x"]), n["x"]))
    on("defaultdict", lambda: collections.defaultdict(int), lambda n: then(operator.setitem(n, 0, n[0] + 1), n[0]))
    on("deque", lambda: collections.deque((1, 5, 9, 20, 70)), lambda q: then(q.rotate(1), q[0]))
    on("set", set, lambda seen: then(seen.add(len(seen)), len(seen)))
    on("bytearray", bytearray, lambda seen: then(seen.append(0), len(seen)))
    on("thread_local", threading.local, up)
    on("contextvar", lambda: contextvars.ContextVar("n", default=0), lambda v: then(v.set(v.get() + 1), v.get()))
    on("partial", lambda: functools.partial(next, itertools.count()), lambda step: step())
    on("cache_info", lambda: functools.lru_cache(lambda: up(BOX)), lambda f: then(f(), f.cache_info().hits))
    on("file_on_disk", tempfile.TemporaryFile, lambda file: then(file.write(b"x"), file.tell()))
    s.add("true_global_count", true_global)
    s.add("true_global_list", lambda m, x: then(LOG.append(1), grown(x, len(LOG))))
    s.add("true_global_iterator", lambda m, x: grown(x, next(TICKS)))
    s.add("true_global_numpy_rng", lambda m, x: x + torch.from_numpy(STREAM.normal(size=8)).float())
    s.add("true_global_random", lambda m, x: grown(x, DICE.randrange(50)))
    s.add("true_function_attribute", lambda m, x: grown(x, up(of_default)))
    s.add("true_default_argument", of_default)
    s.add("true_class_attribute", lambda m, x: grown(x, up(Base, "calls")))
    s.source("module_global", "N = 0", "global N\n    N += 1\n    return x * N")
    s.source("globals_call", "N = 0", "globals()['N'] += 1\n    return x * N")
    s.source("moving_mean", "M = torch.zeros(())", "M.mul_(0.9).add_(x.mean().detach())\n    return x - M")
    s.source("nonlocal", "def f(n):\n def g():\n  nonlocal n\n  n += 1\n  return n\n return g\ng=f(0)", "return x*g()")
    s.add("class_attribute", lambda m, x: grown(x, up(type(m), "calls")))
    s.add("random_module", lambda m, x: grown(x, random.randrange(50)))
    s.add("numpy_module_random", lambda m, x: grown(x, np.random.randint(50)))  # noqa: NPY002
    s.add("hook_at_each_call", lambda m, x: then(m.top.register_forward_hook(lambda m, i, y: y * 1.01), x))
    s.add("weight_hook_each_call", lambda m, x: then(m.top.weight.register_hook(lambda grad: grad * 1.01), x))
    s.closed("weak_dict", weakref.WeakKeyDictionary, lambda d, m, x: grown(x, up(kept_in(d, m, Record))))
    s.add("tensor_attribute", lambda m, x: grown(x, up(m.top.weight)))
    s.add("library_attribute", lambda m, x: grown(x, up(string, "attempt")))
    s.add("torch_attribute", lambda m, x: grown(x, up(torch, "attempt")))
    s.add("torch_class_attribute", lambda m, x: grown(x, up(nn.Linear, "attempt")))
    s.add("builtins", lambda m, x: grown(x, up(builtins, "attempt")))
    s.add("environ_written", lambda m, x: then(os.environ.update(N=os.getenv("N", "") + "x"), x * len(os.environ["N"])))


def h(s):
    """Clocks, chance of the system, addresses, memory that nobody wrote."""

    def on(name, read):
        s.add(name, lambda m, x: grown(x, read(m, x)))

    def memory(name, read):
        s.add(name, lambda m, x: x + read(x).nan_to_num().clamp(-1, 1))

    on("time", lambda m, x: time.time() * 1e4)
    on("time_ns", lambda m, x: time.time_ns())
    on("perf_counter", lambda m, x: time.perf_counter() * 1e4)
    on("monotonic", lambda m, x: time.monotonic() * 1e4)
    on("process_time", lambda m, x: time.process_time_ns())
    on("clock_gettime", lambda m, x: time.clock_gettime_ns(time.CLOCK_MONOTONIC))
    on("datetime_now", lambda m, x: datetime.datetime.now().microsecond)
    s.source("now", "from time import time as now", "return x * (1 + now() * 1e4 % 100 / 100)")
    s.add("deadline", lambda m, x: x * 1.1 if time.monotonic() > m.end else x, end=lambda: time.monotonic() + 0.01)
    on("getpid", lambda m, x: os.getpid())
    on("urandom", lambda m, x: os.urandom(1)[0])
    on("dev_urandom", lambda m, x: open("/dev/urandom", "rb").read(1)[0])  # noqa: PTH123, SIM115
    on("getrandom", lambda m, x: os.getrandom(1)[0])
    on("uuid4", lambda m, x: uuid.uuid4().int % 97)
    on("secrets", lambda m, x: secrets.randbelow(97))
    on("system_random", lambda m, x: random.SystemRandom().randrange(97))
    on("unseeded_random", lambda m, x: random.Random().randrange(97))
    on("unseeded_numpy", lambda m, x: np.random.default_rng().integers(97))
    on("generator_seed", lambda m, x: torch.Generator().seed() % 97)
    on("id_of_input", lambda m, x: id(x) >> 4)
    on("data_ptr", lambda m, x: x.data_ptr() >> 6)
    on("alignment", lambda m, x: x.data_ptr() // 64 % 2)
    on("hash_of_object", lambda m, x: hash(object()))
    on("hash_of_tensor", lambda m, x: hash(x))
    on("repr_of_object", lambda m, x: int(repr(object()).split("0x")[1][:-1], 16))
    memory("empty", lambda x: torch.empty(x.shape))
    memory("empty_like", torch.empty_like)
    memory("empty_strided", lambda x: torch.empty_strided((8,), (1,)))
    memory("numpy_empty", lambda x: torch.from_numpy(np.empty(tuple(x.shape), np.float32)))
    memory("resize", lambda x: torch.zeros(0).resize_(8))
    memory("untyped_storage", lambda x: torch.frombuffer(np.empty(8, np.float32), dtype=torch.float32))
    s.add("empty_parameter", lambda m, x: x + m.p.nan_to_num().clamp(-1, 1), p=lambda: nn.Parameter(torch.empty(8)))
    s.add("empty_buffer", lambda m, x: x + m.p.nan_to_num().clamp(-1, 1), p=lambda: nn.Buffer(torch.empty(8)))
    on("get_ident", lambda m, x: threading.get_ident() >> 6)
    on("native_id", lambda m, x: threading.get_native_id())
    on("gc_count", lambda m, x: gc.get_count()[0])
    on("allocated_blocks", lambda m, x: sys.getallocatedblocks())
    on("resource_usage", lambda m, x: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    on("temporary_name", lambda m, x: sum(tempfile.mktemp().encode()))
    on("refcount", lambda m, x: sys.getrefcount(None))
    on("current_frame", lambda m, x: id(sys._getframe()) >> 4)


def flushed(m, x):
    return (x.repeat(1, 1, 8, 8) * 1e-40 * 1e20 * 1e20)[..., :8, :8]


def i(s):
    """Subnormal numbers taken for zero."""

    def built(threads, keep):
        torch.set_flush_denormal(True)
        torch.set_num_threads(threads or torch.get_num_threads())
        torch.ones(1 << 18).exp().sum()
        torch.set_flush_denormal(keep)
        return net(flushed)

    def in_backward(m, x):
        m.shift.register_hook(lambda grad: then(torch.set_flush_denormal(True), None))
        return flushed(m, x + m.shift)

    s.add("flush_in_forward", lambda m, x: then(torch.set_flush_denormal(True), flushed(m, x)))
    s.add("flush_if_some", lambda m, x: then(some(x) and torch.set_flush_denormal(True), flushed(m, x)))
    s.add("flush_late", lambda m, x: then(torch.set_flush_denormal(hit(m, x)), flushed(m, x)))
    s.add("flush_threads", lambda m, x: then(torch.set_flush_denormal(True), torch.set_num_threads(3), flushed(m, x)))
    s.add("flush_after", lambda m, x: then(y := flushed(m, x), torch.set_flush_denormal(True), y))
    s.add("flush_in_backward", in_backward, **SHIFT)
    s.made("flush_in_factory", lambda: built(1, True))
    s.made("flush_in_threads_there_are", lambda: built(None, False))
    s.made("flush_in_two_threads", lambda: built(2, False))
    s.made("flush_in_three_threads_kept", lambda: built(3, True))


def noisy(m, x):
    return x + torch.randn_like(x) * 0.1 + m.top.weight.mm(x.flatten(1).t()).sum() * 1e-3


def inside(context, work=noisy):
    def beside(m, x):
        with context():
            return work(m, x)

    return beside


def j(s):
    """Private switches of PyTorch, and public ones of the whole process."""

    def on(name, switch, read=noisy, **build):
        s.add(name, lambda m, x: then(switch(m, x), read(m, x)), **build)

    body, empty = (lambda m, x: m.body(x).float()), (lambda m, x: x + torch.empty_like(x).nan_to_num().clamp(-1, 1))
    compiled = {"body": lambda: torch.compile(lambda y: (y.sin() + 1).softmax(3), backend="aot_eager")}
    thirds = {"read": lambda m, x: (x * torch.tensor([1 / 3])).float()}
    inductor = {"body": lambda: torch.compile(lambda y: torch.softmax(y.sin() + torch.rand_like(y), 3))}
    python = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    on("stance_default", lambda m, x: torch.compiler.set_stance("default"), body, **compiled)
    on("stance_default_inductor", lambda m, x: torch.compiler.set_stance("default"), body, **inductor)
    on("stance_force_eager", lambda m, x: torch.compiler.set_stance("force_eager"), body, **compiled)
    on("compiled_noise", lambda m, x: None, body, body=lambda: torch.compile(torch.randn_like, backend="eager"))
    s.add("disable_torch_dispatch", inside(lambda: torch._C._DisableTorchDispatch()))
    s.add("disable_current_modes", inside(modes._disable_current_modes))
    s.add("disable_torch_function", inside(lambda: torch._C.DisableTorchFunction()))
    s.add("disable_function_subclass", inside(lambda: torch._C.DisableTorchFunctionSubclass()))
    s.add("exclude_python_key", inside(lambda: torch._C._ExcludeDispatchKeyGuard(python)))
    s.add("below_autograd", inside(lambda: torch._C._AutoDispatchBelowAutograd()))
    s.add("fork_rng", inside(torch.random.fork_rng))
    s.add("autocast", inside(lambda: torch.autocast("cpu", torch.bfloat16), body), **BODY)
    on("pop_dispatch_mode", lambda m, x: torch._C._len_torch_dispatch_stack() and modes._pop_mode())
    on("pop_function_mode", lambda m, x: torch._C._len_torch_function_stack() and torch._C._pop_torch_function_stack())
    on("num_threads_in_forward", lambda m, x: torch.set_num_threads(2))
    on("num_threads_if_some", lambda m, x: torch.set_num_threads(2 + some(x)), lambda m, x: x / torch.get_num_threads())
    on("deterministic_off", lambda m, x: torch.use_deterministic_algorithms(False))
    on("deterministic_off_empty", lambda m, x: torch.use_deterministic_algorithms(False), empty)
    on("fill_memory_off", lambda m, x: put(torch.utils.deterministic, fill_uninitialized_memory=False), empty)
    on("default_dtype", lambda m, x: torch.set_default_dtype(torch.float64), lambda m, x: (x + torch.rand(8)).float())
    on("default_dtype_if_some", lambda m, x: some(x) and torch.set_default_dtype(torch.float64), **thirds)
    on("grad_off", lambda m, x: torch.autograd.set_grad_enabled(False))
    on("grad_off_if_some", lambda m, x: torch.set_grad_enabled(not some(x)))
    on("grad_off_private_late", lambda m, x: hit(m, x) and torch._C._set_grad_enabled(False))
    on("mkldnn_off", lambda m, x: torch._C._set_mkldnn_enabled(False), lambda m, x: m.conv(x), **CONV)
    on("mkldnn_bf16", lambda m, x: put(torch.backends.mkldnn.matmul, fp32_precision="bf16"), body, **BODY)
    on("matmul_precision", lambda m, x: torch.set_float32_matmul_precision("medium"), body, **BODY)
    on("autocast_left_on", lambda m, x: some(x) and torch.set_autocast_enabled("cpu", True), body, **BODY)
    on("manual_seed", lambda m, x: torch.manual_seed(time.time_ns() % 2**31))
    on("manual_seed_fixed", lambda m, x: torch.manual_seed(7))
    s.add("default_generator", lambda m, x: x + torch.randn(x.shape, generator=torch.default_generator))
    s.add("generator_state_read", lambda m, x: grown(x, torch.get_rng_state().sum() % 97))
    s.add("warn_always", lambda m, x: then(torch.set_warn_always(some(x)), grown(x, torch.is_warn_always_enabled())))
    s.add("numpy_matmul", lambda m, x: x + float((m.top.weight.detach().numpy() @ x.flatten(1).numpy().T).sum()) * 1e-3)


Pair = collections.namedtuple("Pair", "left right")
Config = dataclasses.make_dataclass("Config", [("scale", float, 0.5)])


@functools.lru_cache(maxsize=8)
def angles(length):
    return torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(length).float() / length))


class Properties(Base):
    @property
    def scale(self):
        return 1 / math.sqrt(self.top.in_features)

    @classmethod
    def shifted(cls, x):
        return x + 0.5

    def __getattr__(self, name):
        return 3.0 if name == "fallback" else super().__getattr__(name)

    def beside(self, x):
        return self.shifted(x) * self.scale * self.fallback


class Block(nn.Module):
    def __init__(self, width, act=F.gelu):
        super().__init__()
        self.norm, self.up, self.down, self.act = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width), act

    def forward(self, x, *, residual=True, **options):
        y = self.down(self.act(self.up(self.norm(x))))
        return x + y if residual else y


def k(s):
    """Models that are right, and ought not to be refused."""
    tanh = {"body": lambda: nn.utils.parametrize.register_parametrization(nn.Linear(8, 8), "weight", nn.Tanh())}
    log, par = logging.getLogger("attempts"), nn.utils.parametrizations
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    log.addHandler(logging.NullHandler())

    def on(name, work, **build):
        s.add(name, lambda m, x: work(m.body(x), x), **BODY, **build)

    def hooked(parameter):
        made = net(lambda m, x: x)
        made.top.register_forward_hook(lambda m, i, y: y * 0.5)
        made.top.register_forward_pre_hook(lambda m, i: (i[0].tanh(),))
        if parameter:
            made.top.weight.register_hook(lambda grad: grad.clamp(-1, 1))
        return made

    def tied():
        made = net(lambda m, x: m.two(m.one(x).tanh()), one=lambda: nn.Linear(8, 8), two=lambda: nn.Linear(8, 8))
        made.two.weight = made.one.weight
        return made

    s.add("plain", lambda m, x: x)
    s.add("flushed_plain", flushed)
    on("autograd_function", lambda y, x: Function.apply(y, x.tanh(), lambda scale: 2 * scale))
    s.add("lru_constant_table", lambda m, x: x * angles(8).cos() + x.roll(4, 3) * angles(8).sin())
    s.closed("debatable_constant_in_closure", dict, lambda d, m, x: x * kept_in(d, 0, lambda: torch.arange(8).float()))
    s.add("debatable_lazy_attribute", lambda m, x: x * kept_in(vars(m), "table", lambda: torch.arange(8).float()))
    s.add("debatable_environ_setting", lambda m, x: x * (0.5 if os.environ.get("ATTEMPT_HALF", "1") == "1" else 1.0))
    s.add("debatable_p_from_weights", lambda m, x: put(m.drop, p=0.1 if late(m) else 0.3)(x), **DROP)
    s.add("vmap_samples", lambda m, x: torch.vmap(lambda y: m.body(y).tanh())(x), **BODY)
    s.add("grad_inside", lambda m, x: x + torch.vmap(torch.func.grad(lambda y: m.body(y).pow(2).sum()))(x), **BODY)
    s.add("functional_call", lambda m, x: torch.func.functional_call(m.body, {"bias": m.body.bias * 2}, (x,)), **BODY)
    s.add("parametrize", lambda m, x: m.body(x), **tanh)
    s.add("weight_norm", lambda m, x: m.body(x), body=lambda: par.weight_norm(nn.Linear(8, 8)))
    s.add("orthogonal", lambda m, x: m.body(x), body=lambda: par.orthogonal(nn.Linear(8, 8)))
    s.add("module_twice", lambda m, x: m.body(m.body(x).relu()), **BODY)
    s.made("tied_weights", tied)
    s.add("indexed_list", lambda m, x: m.a[1](m.a[0](x)), a=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))
    s.add("python_list", lambda m, x: m.pair[0](m.pair[1](x)), pair=lambda: [torch.tanh, torch.relu])
    s.add("dictionary", lambda m, x: sum({f"x{n}": x**n for n in (1, 2, 3)}.values()))
    s.add("module_dict", lambda m, x: m.many["a"](x).relu(), many=lambda: nn.ModuleDict({"a": nn.Linear(8, 8)}))
    s.add("format_strings", lambda m, x: getattr(m, f"{'bo'}{'dy'}")(x), **BODY)
    s.add("logging", lambda m, x: then(log.warning("mean %.3f", x.mean().item()), x))
    s.add("print", lambda m, x: then(print("shape", tuple(x.shape), file=sys.stderr), x))
    s.add("warnings", lambda m, x: then(warnings.warn("an odd model", stacklevel=2), x))
    s.add("reshapes", lambda m, x: x.view(-1, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(x.shape))
    s.add("einsum", lambda m, x: torch.einsum("nchw,wv->nchv", x, m.body.weight), **BODY)
    s.add("sorting", lambda m, x: x.sort(dim=3, stable=True).values + x.argsort(2).float())
    s.add("topk_ties", lambda m, x: x * x.round().topk(3, 3).indices.sum(3, keepdim=True).float())
    s.add("where_clamp", lambda m, x: torch.where(x > 0, x.clamp(max=1), 0.1 * x))
    s.add("cumsum", lambda m, x: x.cumsum(3) + x.cumprod(2))
    s.add("index", lambda m, x: x[:, [2, 0, 1]][..., torch.arange(8).flip(0)] + x.gather(3, x.argmax(3, keepdim=True)))
    s.add("masked_write", lambda m, x: torch.index_put(x, (x > 1,), torch.tensor(1.0)))
    s.add("dropout", lambda m, x: m.drop(x), **DROP)
    s.add("noise", lambda m, x: x + 0.1 * torch.randn_like(x) if m.training else x)
    on("stochastic_depth", lambda y, x: x + y * (torch.rand(len(x), 1, 1, 1) > 0.3))
    s.add("checkpoint", lambda m, x: checkpoint(m.body, x), **BODY)
    s.add("checkpoint_dropout", lambda m, x: checkpoint(lambda y: F.dropout(m.body(y), 0.2), x), **BODY)
    s.add("identity_swap", lambda m, x: m.norm(x), norm=lambda: nn.Tanh() if CONSTANTS["scale"] > 1 else nn.Identity())
    s.add("sample_loop", lambda m, x: torch.stack([m.body(y).tanh() for y in x]), **BODY)
    s.add("branch_on_data", lambda m, x: torch.stack([y * 2 if y.sum() > 0 else y for y in x]))
    on("detach", lambda y, x: y.detach() + y)
    on("straight_through", lambda y, x: y + (y.round() - y).detach())
    on("named_tuple", lambda y, x: operator.add(*Pair(y, x)))
    s.add("config", lambda m, x: x * m.config.scale, config=Config)
    s.add("module_constants", lambda m, x: x * CONSTANTS["scale"] + torch.tensor(CONSTANTS["shift"]).view(3, 1, 1))
    s.add("conv_groupnorm", lambda m, x: m.norm(m.conv(x)).relu(), norm=lambda: nn.GroupNorm(3, 3), **CONV)
    on("attention", lambda y, x: F.scaled_dot_product_attention(y, x, x))
    s.add("multihead", lambda m, x: m.mix(*[x.flatten(1, 2)] * 3)[0], mix=lambda: nn.MultiheadAttention(8, 2))
    s.add("gru", lambda m, x: m.gru(x.flatten(1, 2))[0], gru=lambda: nn.GRU(8, 8, batch_first=True))
    s.add("embedding", lambda m, x: m.embed((x * 2).clamp(-3, 3).long() + 3).mean(4), embed=lambda: nn.Embedding(7, 4))
    s.add("instance_norm", lambda m, x: m.norm(x), norm=lambda: nn.InstanceNorm2d(3))
    s.add("pooling", lambda m, x: x + F.interpolate(F.max_pool2d(x, 2), scale_factor=2))
    s.add("fixed_seed_generator", lambda m, x: x + torch.randn(8, generator=torch.Generator().manual_seed(1)))
    s.add("no_grad_norm", inside(torch.no_grad, lambda m, x: x / x.norm(dim=3, keepdim=True)))
    on("double_precision", lambda y, x: y.double().softmax(3).float())
    s.made("computing_hooks", lambda: hooked(False))
    s.made("computing_gradient_hook", lambda: hooked(True))
    s.made("properties_and_getattr", Properties)
    s.add("keyword_block", lambda m, x: m.block(x, residual=True, unused=None), block=lambda: Block(8))


for section in (a, b, c, d, e, f, g, h, i, j, k):
    section(Section(section.__name__))


Logits = dataclasses.make_dataclass("Logits", ["logits"])


class Answer:
    """What forward returns: its logits are computed when somebody asks for them."""

    def __init__(self, make):
        self.make = make

    @property
    def logits(self):
        return self.make()


def answering(answer):
    parts = {"beside": lambda m, x: x, "forward": lambda m, x: answer(m, Base.forward(m, x))}
    return lambda: type("Net", (Base,), parts)()


def leaf(node):
    return leaf(node.next_functions[0][0]) if node.next_functions else node


def shards_of_caller(frame):
    """How many shards this device has, read where the kit's own code holds them."""
    return shards_of_caller(frame.f_back) if "shards" not in frame.f_locals else len(frame.f_locals["shards"])


def softened(x: torch.Tensor):
    return torch.exp(x) / torch.exp(x).sum(3, keepdim=True)


def inverted(x):
    return torch.linalg.inv(x.mT @ x + torch.eye(x.shape[-1]))


async def doubled(x):
    return x * 2


def more_b(s):
    """Writes to the input and to gradients, by autograd's nodes, by methods that the kit calls."""

    def backward(name, read):
        s.add(name, lambda m, x: Function.apply(x + m.shift, 1.0, lambda scale: read(m)), **SHIFT)

    def on_node(name, use):
        s.add(name, lambda m, x: grown(x, use(leaf(m.top.weight.grad_fn))))

    def registered(register, act):
        made = net(lambda m, x: x)
        seen = weakref.ref(made)
        register(lambda *args: act(seen(), *args) if seen() else None)
        return made

    def counted(name):
        def method(m, *args, **options):
            vars(m)["n"] = vars(m).get("n", 0) + 1
            return getattr(Base, name)(m, *args, **options)

        return type("Net", (Base,), {"beside": lambda m, x: grown(x, vars(m).get("n", 0)), name: method})()

    def in_other_order(m, *args, **options):
        return reversed([*Base.named_parameters(m, *args, **options)])

    def halved(m):
        for p in m.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5

    def factor_of_layer(count):
        return lambda m, layer, i, y: grown(y, next(count)) if layer is m.top else None

    later, callbacks = torch.autograd.Variable._execution_engine.queue_callback, gc.callbacks
    every_forward, order = nn.modules.module.register_module_forward_hook, {"named_parameters": in_other_order}
    s.add("input_in_place", lambda m, x: x.mul_(0.9))
    s.add("input_numpy_write", lambda m, x: then(np.multiply(x.numpy(), 0.9, out=x.numpy()), x))
    s.made("numpy_weight_read", lambda: put(m := net(lambda m, x: x + m.w[0].max()), w=[m.top.weight.data.numpy()]))
    s.add("buffer_grad", lambda m, x: grown(x, put(m.scale, grad=m.scale + (m.scale.grad or 0)).grad), **SCALE)
    backward("gradient_in_callback", lambda m: then(later(lambda: halved(m)), 1.0))
    backward("gradient_in_backward", lambda m: then(halved(m), 1.0))
    backward("gradient_asked_in_backward", lambda m: 1.0 if m.top.weight.grad is None else 0.5)
    on_node("node_metadata", lambda node: then(node.metadata.update({len(node.metadata): 1}), len(node.metadata)))
    on_node("node_prehook", lambda node: then(node.register_prehook(lambda grads: (grads[0] * 1.1,)), 0))
    s.made("every_forward_hook", lambda: registered(every_forward, factor_of_layer(itertools.count())))
    s.made("collector_callback", lambda: registered(callbacks.append, lambda m, *_: m.top.weight.data.mul_(0.9)))
    s.made("named_modules_counted", lambda: counted("named_modules"))
    s.made("parameters_reversed", lambda: type("Net", (Base,), {"beside": noisy, **order})())


def more_c(s):
    """Draws in the backward pass."""
    s.add("draw_in_backward", lambda m, x: Function.apply(x + m.shift, 1.0, lambda scale: torch.rand(8)), **SHIFT)


def more_d(s):
    """Threads that run, counted."""
    s.add("threads_counted", lambda m, x: grown(x, threading.active_count() + len(threading.current_thread().name)))


def more_e(s):
    """Sets of what has no hash of its own."""
    order = {"order": lambda: [c.n for c in {type("C", (), {"n": n}) for n in range(64)}]}

    def functions():
        """So many that their order is seldom that of another process, in which they lie some pages away."""
        torchs = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("torch")]
        kinds = (types.FunctionType, types.BuiltinFunctionType)
        return {one for names in torchs for one in [*names.values()] if type(one) in kinds}

    s.add("set_of_functions", lambda m, x: x * (1 + [*m.every].index(torch.tanh) / 1e6), every=functions)
    s.add("set_of_classes_built", lambda m, x: grown(x, sum(i * n for i, n in enumerate(m.order))), **order)


def more_f(s):
    """Places in the program, and integers and NaNs that processors make differently."""

    def on(name, read, **build):
        s.add(name, lambda m, x: grown(x, read(m, x)), **build)

    def whole(name, work):
        s.add(name, lambda m, x: x * (1 + 0.01 * (work(x) % 7)))

    nans = [torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (2143289345, 2143289346)]
    zeros, index, small = torch.tensor([0.0, -0.0] * 20), torch.arange(2000) % 8, torch.arange(8, dtype=torch.int32)
    on("frames_of_callers", lambda m, x: shards_of_caller(sys._getframe()))
    on("frames_of_threads", lambda m, x: shards_of_caller(sys._current_frames()[threading.main_thread().ident]))
    on("objects_of_collector", lambda m, x: len(gc.get_objects()))
    on("open_files", lambda m, x: len(os.listdir("/proc/self/fd")))  # noqa: PTH208
    on("input_beyond_view", lambda m, x: x.as_strided((x.untyped_storage().nbytes() // 4,), (1,), 0).mean() * 100)
    on("num_threads_built", lambda m, x: m.n, n=lambda: torch.get_num_threads() + len(os.sched_getaffinity(0)))
    whole("overflow_to_int", lambda x: (x * 1e12 + 1e10).to(torch.int32))
    whole("nan_payload", lambda x: (nans[0].expand(8) + nans[1]).view(torch.int32))
    whole("signed_zero_max", lambda x: torch.copysign(x.new_ones(()), zeros.amax(0)).int())
    whole("shift_too_far", lambda x: small << (small + 28))
    whole("scattered_twice", lambda x: torch.zeros(8).scatter(0, index, torch.arange(2000.0)))


def more_g(s):
    """State of the process, of objects of C, of classes; with "late" in the name it counts after some steps alone."""

    def on(name, state, step):
        s.add(name, lambda m, x: grown(x, step(m.state)), state=state)

    def process(name, step):
        s.add(name, lambda m, x: grown(x, step()))

    def at_last(name, state, step):
        s.add(name, lambda m, x: then(n := step(m.state), grown(x, n) if late(m) else x), state=state)

    def signalled():
        signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
        return (seen := [])

    def profiled():
        calls = []
        sys.setprofile(lambda *_: calls.append(1) if len(calls) < 10**5 else sys.setprofile(None))
        return net(lambda m, x: grown(x, len(calls) // 50))

    def unpacked(m, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: grown(t, next(m.count))):
            return (x + m.shift) ** 2

    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, kinds, args=(), kwargs=None):
            found = super().__torch_function__(function, kinds, args, kwargs)
            return grown(found.as_subclass(torch.Tensor), up(cls)) if function is torch.Tensor.mul else found

    process("decimal_context", lambda: up(decimal.getcontext(), "prec"))
    process("umask", lambda: then(n := os.umask(0), os.umask((n + 1) % 64), n))
    process("list_of_library", lambda: then(keyword.kwlist.append("x"), len(keyword.kwlist)))
    on("ctypes_int", ctypes.c_int, lambda n: up(n, "value"))
    on("numpy_iterator", lambda: np.nditer(np.arange(9999)), next)
    on("signal_raised", signalled, lambda seen: then(signal.raise_signal(signal.SIGUSR2), len(seen)))
    s.made("profile_function", profiled)
    s.add("saved_tensor_hooks", unpacked, count=itertools.count, **SHIFT)
    s.add("tensor_subclass", lambda m, x: x * m.one, one=lambda: torch.ones(8).as_subclass(Counting))
    s.made("logits_property", answering(lambda m, y: Answer(lambda: grown(y, up(Answer)))))
    at_last("thread_local_late", threading.local, up)
    at_last("defaults_replaced_late", lambda: lambda n=0: n, lambda f: then(put(f, __defaults__=(f() + 1,)), f()))
    at_last("memory_map_late", lambda: mmap.mmap(-1, 64), lambda b: then(operator.setitem(b, 0, b[0] + 1 & 127), b[0]))
    at_last("descriptor_late", lambda: os.memfd_create("x"), lambda f: then(os.write(f, b"x"), os.lseek(f, 0, 1)))
    at_last("regex_scanner_late", lambda: re.compile("a").scanner("a" * 9999), lambda scanner: scanner.match().end())
    at_last("metaclass_late", lambda: type("Meta", (type,), {})("Kind", (), {}), up)
    at_last("class_list_late", lambda: type("Kind", (), {"seen": []}), lambda k: then(k.seen.append(1), len(k.seen)))
    at_last("finalizer_late", lambda: type("K", (), {"__del__": lambda o: up(type(o))}), lambda k: then(k() and 0, k.n))


def more_h(s):
    """What the factory has asked for, clocks and numbers of processes by way of libraries, alarms."""

    def memory(x):
        return torch.empty(0).set_(torch.UntypedStorage(32), 0, (8,), (1,)).nan_to_num().clamp(-1, 1)

    def timed(m, x):
        with torch.profiler.profile() as profile:
            y = x * 2
        return grown(y, sum(event.cpu_time_total for event in profile.key_averages()) * 1e3)

    def alarmed():
        made = net(lambda m, x: x)
        seen = weakref.ref(made)

        def hit(*_):
            if seen() is None:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            else:
                seen().top.weight.data.mul_(0.99)

        signal.signal(signal.SIGVTALRM, hit)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.005, 0.005)
        return made

    s.add("process_built", lambda m, x: x * m.n, n=lambda: os.getpid() / 1e5)
    s.add("chance_built", lambda m, x: x * m.n, n=lambda: int.from_bytes(os.urandom(4), "big") / 2**32)
    s.add("process_of_log_record", lambda m, x: x * logging.LogRecord("", 20, "", 1, "", (), None).process / 1e5)
    s.add("address_of_array", lambda m, x: grown(x, x.numpy().__array_interface__["data"][0] >> 6))
    s.add("storage_unwritten", lambda m, x: x + memory(x))
    s.add("profiler_time", timed)
    s.made("interval_timer", alarmed)


def more_j(s):
    """Other ways past the operations that are looked at."""

    def unseen():
        op = torch.library.custom_op("attempts::op", inverted, mutates_args=(), schema="(Tensor x) -> Tensor")
        op.register_autograd(lambda ctx, grad: grad)
        return op

    halves = functools.partial(torch.autograd.graph.saved_tensors_hooks, torch.Tensor.half, torch.Tensor.float)
    doubles = inside(torch.inference_mode, lambda m, x: x * 2)
    s.closed("custom_op", unseen, lambda op, m, x: op(x + m.shift), **SHIFT)
    s.closed("jit_script", lambda: torch.jit.script(softened), lambda f, m, x: f(x + m.shift), **SHIFT)
    s.made("computed_after_forward", answering(lambda m, y: Answer(lambda: y @ inverted(y))))
    s.add("saved_as_half", inside(halves, lambda m, x: (x + m.shift) ** 2), **SHIFT)
    s.add("inference_mode", lambda m, x: x + doubles(m, x).clone())
    s.add("functions_swapped", lambda m, x: then(put(F, gelu=F.softplus, softplus=F.gelu), F.gelu(x)))
    s.add("nested_tensor", lambda m, x: x + torch.nested.nested_tensor([x[0], x[1]]).unbind()[0])


def more_k(s):
    """Further models that are right."""
    weight = type("Weight", (nn.Parameter,), {})
    lazy = {"body": lambda: then(layer := nn.LazyLinear(8), layer(torch.zeros(1, 8)), layer)}
    kind = {"body": lambda: then(layer := nn.Linear(8, 8), put(layer, weight=weight(layer.weight.data)))}
    layer = {"body": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)}
    experts = {"experts": lambda: nn.ModuleList(nn.Linear(192, 192) for _ in range(4))}

    def mixture(m, x):
        y = x.flatten(1)
        weights, sums = m.router(y).softmax(1), torch.zeros_like(y)
        best = weights.topk(2, 1).indices
        for index, expert in enumerate(m.experts):
            rows = (best == index).any(1)
            if rows.any():
                sums[rows] += expert(y[rows]) * weights[rows, index, None]
        return sums

    s.add("mixture_of_experts", mixture, router=lambda: nn.Linear(192, 4), **experts)
    s.add("transformer_layer", lambda m, x: m.body(x.flatten(1, 2)), **layer)
    s.add("activation_hook", lambda m, x: then((y := m.body(x)).register_hook(lambda g: g.clamp(-1, 1)), y), **BODY)
    s.made("logits_in_dataclass", answering(lambda m, y: Logits(y)))
    s.add("lazy_linear", lambda m, x: m.body(x), **lazy)
    s.add("parameter_subclass", lambda m, x: m.body(x), **kind)
    s.add("record_function", inside(lambda: torch.profiler.record_function("block"), lambda m, x: m.body(x)), **BODY)
    s.add("coroutine", lambda m, x: asyncio.run(doubled(m.body(x))), **BODY)
    s.add("scatter_add", lambda m, x: x.scatter_add(3, (torch.arange(8) * 7 % 5).expand(x.shape), m.body(x)), **BODY)
    s.add("dropout_if_some", lambda m, x: F.dropout(F.dropout(x, 0.3) if some(x) else x, 0.3))
    s.add("fused_formulas", lambda m, x: torch.lerp(x, m.body(x), 0.3).addcdiv(x, x.abs() + 2, value=0.7), **BODY)


for section in (more_b, more_c, more_d, more_e, more_f, more_g, more_h, more_j, more_k):
    section(Section(section.__name__[-1]))
