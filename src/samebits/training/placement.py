"""Places a training on the available machines, by the rule of its strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from samebits.host import count_cores, count_gpus
from samebits.strategies import STRATEGIES
from samebits.strategies.placement import Devices, Request

if TYPE_CHECKING:
    from samebits.batch_split import BatchSplit
    from samebits.params import Params
    from samebits.params.schema import NumericsName
    from samebits.remarks import NotAppliedKind
    from samebits.strategies import StrategyName
    from samebits.strategies.placement import Placement


def this_machine() -> Devices:
    """The visible GPUs and the usable cores of this host."""
    return Devices(gpus=count_gpus(), cores=count_cores())


def place(
    strategy: StrategyName, params: Params, numerics: NumericsName, *nodes: Devices
) -> tuple[Placement, BatchSplit]:
    """Choose the devices of each machine and split the batch. Either all machines have GPUs or none has.

    A single machine gets ``train.num_devices``, each of several its own ``wanted``. In ``exact`` the numbers may
    differ, because shards stay whole.

    Raises:
        HostError: more devices are requested than exist, without ``train.oversubscribe``.
        UserError: the batch cannot be split over the requested devices; there are several machines, and the strategy
            has no ranks; or machines would get unequal parts in ``fast``.
    """
    if len(nodes) == 1:
        nodes = (replace(nodes[0], wanted=params.train.num_devices),)
    how = STRATEGIES[strategy]
    request = Request(
        strategy=strategy,
        numerics=numerics,
        whole=params.batch_split(numerics),
        nodes=nodes,
        oversubscribe=params.train.oversubscribe,
        settings=how.settings_of(params.train),
    )
    return how.place(request)


def not_applied(
    params: Params, placement: Placement, numerics: NumericsName, *, tf32: bool
) -> dict[str, NotAppliedKind]:
    """Valid settings without effect in this training, each with the reason. ``tf32``: the GPU supports it."""
    train = params.train
    reasons: dict[str, NotAppliedKind] = {}
    if numerics == "exact":
        if train.compile:
            reasons["train.compile"] = "exact_is_not_compiled"
        if train.precision != "fp32":
            reasons["train.precision"] = "exact_is_fp32"
    else:
        if train.precision == "tf32" and placement.device_type == "cpu":
            reasons["train.precision"] = "no_tf32_on_cpu"
        elif train.precision == "tf32" and not tf32:
            reasons["train.precision"] = "gpu_before_tf32"
    over = params.exact.batch_norm if numerics == "exact" else "device"
    wanted = {"train.compile": train.compile, "train.cuda_graphs": train.cuda_graphs}
    for setting, why in STRATEGIES[placement.strategy].not_applied.items():
        if wanted[setting]:
            reasons.setdefault(setting, why)
    if train.cuda_graphs and (hindered := train.why_no_graphs(placement.device_type, over)):
        reasons.setdefault("train.cuda_graphs", hindered)
    unsynced = train.ddp.sync_batchnorm and not train.ddp.synchronizes(placement.device_type)
    if unsynced and placement.has_ranks:
        reasons["train.ddp.sync_batchnorm"] = "sync_on_cpu"
    if train.ddp.static_graph and train.grad_accum_steps > 1 and placement.has_ranks:
        reasons["train.ddp.static_graph"] = "static_graph_with_accumulation"
    usual = type(train.optimizer).model_fields["momentum"].default  # it need not be written in params.yaml
    if train.optimizer.name != "sgd" and train.optimizer.momentum not in (0.0, usual):
        has_none = train.optimizer.name == "adamw"
        reasons["train.optimizer.momentum"] = "adamw_has_no_momentum" if has_none else "momentum_of_sgd_alone"
    alone = {*train.strategies} == {placement.strategy}  # else the number is that of the others
    if alone and train.num_devices != "auto" and train.num_devices > placement.num_devices:
        reasons["train.num_devices"] = "single_has_one_device"
    return reasons
