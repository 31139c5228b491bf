"""DDP: every rank holds everything, and gradients are summed while backward still runs.

Li et al. 2020 (arXiv 2006.15704) by torch's DistributedDataParallel around the body. The head runs outside of it, in
chunks, before the body goes back, so DDP is kept from its parameters, and they are summed once at the end.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from fitune.engine.plain import PlainEngine
from fitune.engine.protocol import EnterPhase, LossModel, Update
from fitune.units import MIB
from fitune.values.choices import DDP_BUCKET_BYTES
from fitune.values.plan import Plan


def replicate(body: nn.Module, head: nn.Module) -> DistributedDataParallel:
    """``body``, summing the gradients of its parameters over all ranks; not of those that ``head`` uses too.

    Weights are equal on all ranks: read from the same files, drawn from the same seed. So nothing is sent at first, and
    buffers never change.
    """
    of_head = {id(parameter) for parameter in head.parameters()}
    ignored = [name for name, parameter in body.named_parameters() if id(parameter) in of_head]
    buffers = [name for name, _ in body.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(body, ignored + buffers)
    replicated = DistributedDataParallel(
        body,
        init_sync=False,
        bucket_cap_mb=DDP_BUCKET_BYTES // MIB,
        gradient_as_bucket_view=True,  # or the buckets would be a second copy of all gradients
    )

    def added_up(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """The sum over all ranks, and no mean of it: the loss is divided by the tokens of all ranks."""
        sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return sent.then(lambda summed: summed.value()[0])

    replicated.register_comm_hook(None, added_up)
    return replicated


class ReplicatedEngine(PlainEngine):
    """The ordinary engine on every rank, with the gradients of all.

    They are alike everywhere, so norm, clipping and step need nobody else. Gradients stay between two steps, as views
    of DDP's buckets, and are set to zero.
    """

    def __init__(
        self,
        model: LossModel,
        parameters: Mapping[str, Parameter],
        *,
        body: DistributedDataParallel,
        plan: Plan,
    ) -> None:
        super().__init__(
            model,
            parameters,
            optimizer=plan.optimizer,
            precision=plan.precision,
            max_grad_norm=plan.schedule.max_grad_norm,
        )
        self.body = body
        ignored = body.parameters_to_ignore
        summed = {id(p) for name, p in body.module.named_parameters() if name not in ignored}
        self.outside = [parameter for parameter in self.parameters.values() if id(parameter) not in summed]
        """Those whose gradients DDP does not sum."""

    def forward_backward(
        self, batch: Any, *, divisor: int, enter_phase: EnterPhase, last: bool = True
    ) -> Tensor:
        """Gradients are summed over ranks with the ``last`` micro-batch of a step; before, each rank keeps its own."""
        with nullcontext() if last else self.body.no_sync():
            loss = super().forward_backward(batch, divisor=divisor, enter_phase=enter_phase)
        if last:
            for parameter in self.outside:
                if parameter.grad is None:  # the last rows of this rank teach nothing: it adds zeros
                    parameter.grad = torch.zeros_like(parameter)
            sent = [dist.all_reduce(parameter.grad, async_op=True) for parameter in self.outside]
            for each in sent:
                each.wait()
        return loss

    def update(self, *, learning_rate: float, enter_phase: EnterPhase) -> Update:
        """The gradients stay where DDP's buckets are, and are zero for the next step."""
        kept = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        done = super().update(learning_rate=learning_rate, enter_phase=enter_phase)
        torch._foreach_zero_(list(kept.values()))
        for name, gradient in kept.items():
            self.parameters[name].grad = gradient
        return done
