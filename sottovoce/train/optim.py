"""AdamW with the choices that decide how much memory a training takes, and whether small steps arrive.

A weight in bf16 has 8 bits: a step below 1/256 of it is lost. Either the optimizer keeps fp32 masters ("master", 4
bytes a weight), or it rounds up or down by chance, so that steps arrive on average ("stochastic", nothing). The two
moments take 8 bytes a weight, or 2 with `state_bits` 8. `fuse` updates each weight as soon as its gradient is there and
frees the gradient, so that never all of them exist. Knows no model and no schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn

from sottovoce.train.ranks import local
from sottovoce.types import InputError

BLOCK = 256  # numbers that share a scale in 8-bit moments
CHUNK = 1 << 22  # numbers that are worked on at once: 16 MiB for each temporary. A multiple of BLOCK
MIN_8BIT = 4096  # smaller tensors keep fp32 moments: they save nothing, and norms and biases are touchy


@dataclass(frozen=True)
class AdamOptions:
    """`weight_decay` acts on matrices that are no embeddings. `rounding` matters only for weights below fp32.
    `has_kernel` makes steps with 8-bit moments and without masters in one Triton kernel each; None does so on a GPU."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    state_bits: int = 32
    rounding: Literal["master", "stochastic"] = "stochastic"
    has_kernel: bool | None = None

    def __post_init__(self) -> None:
        if self.state_bits not in (8, 32):
            raise InputError(f"state_bits must be 8 or 32, got {self.state_bits}", field="state_bits")
        if self.rounding not in ("master", "stochastic"):
            raise InputError(f"rounding must be 'master' or 'stochastic', got {self.rounding!r}", field="rounding")


class AdamW:
    """
    Args:
        parameters: name -> parameter, those with `requires_grad`. All state is allocated here, so that what does not
            fit fails at once.
        factors: of the learning rate, by the beginning of a name; 1 for all others.

    Raises InputError for fp16, in which gradients overflow.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        options: AdamOptions | None = None,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.parameters, self.options = dict(parameters), options or AdamOptions()
        if any(parameter.dtype == torch.float16 for parameter in self.parameters.values()):
            raise InputError("float16 cannot be trained: gradients overflow; use bfloat16 or float32", field="dtype")
        self.num_steps, self.learning_rate, self.factors = 0, 0.0, dict(factors or {})
        self.state = {name: self._new_state(parameter) for name, parameter in self.parameters.items()}

    def begin_step(self, learning_rate: float) -> None:
        """Fixes the rate of the step whose gradients come next."""
        self.num_steps += 1
        self.learning_rate = learning_rate

    def fuse(self) -> None:
        """From now on, backward passes update each weight and free its gradient; `apply` has nothing left to do.

        Hooks know the optimizer by a weak reference: a ring through a tensor's hooks is never collected.
        """
        own = weakref.ref(self)

        def update(name: str) -> None:
            if (optimizer := own()) is not None:
                optimizer._update(name, 1.0)

        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: update(name))

    def apply(self, scale: float = 1.0) -> None:
        """Moves all weights by their gradients times `scale`, and frees the gradients.

        Small float32 tensors go together, with the same results: a small model has hundreds of them, and each by itself
        would be sixteen launches.
        """
        together: list[str] = []
        size = 0
        for name, parameter in self.parameters.items():
            if parameter.grad is None or parameter.dtype != torch.float32 or "first_scale" in self.state[name]:
                self._update(name, scale)
                continue
            if size + parameter.numel() > CHUNK:
                self._update_together(together, scale)
                together, size = [], 0
            together.append(name)
            size += parameter.numel()
        self._update_together(together, scale)

    def clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        """Of all gradients together, fp32 and exact also where they are sharded (then on every process)."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if not gradients:
            return torch.zeros(())
        norms = torch._foreach_norm([local(gradient) for gradient in gradients], 2, dtype=torch.float32)
        total = torch.stack(norms).square().sum()
        if hasattr(gradients[0], "to_local"):
            torch.distributed.all_reduce(total)
        return total.sqrt()

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, to be saved, and to be overwritten in place when a run goes on."""
        return {f"{name}:{key}": tensor for name, state in self.state.items() for key, tensor in state.items()}

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        values = local(parameter).detach()
        if not values.is_contiguous():
            raise ValueError("parameters must be contiguous, for they are updated in flat pieces")
        count, state = values.numel(), {}
        if self.options.state_bits == 8 and count >= MIN_8BIT:
            blocks = -(-count // BLOCK)
            state["first"] = torch.zeros(count, dtype=torch.int8, device=values.device)
            state["second"] = torch.zeros(count, dtype=torch.uint8, device=values.device)
            state["first_scale"] = torch.zeros(blocks, device=values.device)
            state["second_scale"] = torch.zeros(blocks, device=values.device)
        else:
            state["first"] = torch.zeros(count, device=values.device)
            state["second"] = torch.zeros(count, device=values.device)
        if self.options.rounding == "master" and values.dtype != torch.float32:
            state["master"] = values.float().view(-1).clone()
        return state

    @torch.no_grad()
    def _update(self, name: str, scale: float) -> None:
        parameter, state = self.parameters[name], self.state[name]
        if parameter.grad is None:
            return
        weights, gradient = local(parameter).detach().view(-1), local(parameter.grad).reshape(-1)
        rate, decay = self._rate(name)
        if self._has_kernel(weights) and "first_scale" in state and "master" not in state:
            self._launch(weights, gradient, state, scale, rate, decay)
            parameter.grad = None
            return
        for start in range(0, len(weights), CHUNK):
            part = slice(start, min(start + CHUNK, len(weights)))
            self._update_chunk(weights, gradient[part].float() * scale, state, part, rate, decay)
        parameter.grad = None

    @torch.no_grad()
    def _update_together(self, names: list[str], scale: float) -> None:
        """`_update` of float32 tensors, as few launches."""
        if len(names) < 2:
            for name in names:
                self._update(name, scale)
            return
        (beta1, beta2), parameters = self.options.betas, [self.parameters[name] for name in names]
        weights = [local(parameter).detach().view(-1) for parameter in parameters]
        slopes = [local(parameter.grad).reshape(-1) for parameter in parameters]
        firsts, seconds = ([self.state[name][key] for name in names] for key in ("first", "second"))
        rates = [self._rate(name) for name in names]
        torch._foreach_mul_(slopes, scale)
        torch._foreach_lerp_(firsts, slopes, 1 - beta1)
        torch._foreach_mul_(slopes, slopes)
        torch._foreach_lerp_(seconds, slopes, 1 - beta2)
        spreads = torch._foreach_div(seconds, 1 - beta2**self.num_steps)
        torch._foreach_sqrt_(spreads)
        torch._foreach_add_(spreads, self.options.eps)
        torch._foreach_mul_(weights, [1 - rate * decay for rate, decay in rates])
        torch._foreach_addcdiv_(weights, firsts, spreads, [-rate / (1 - beta1**self.num_steps) for rate, _ in rates])
        for parameter in parameters:
            parameter.grad = None

    def _rate(self, name: str) -> tuple[float, float]:
        """Learning rate and weight decay of a parameter."""
        rate = self.learning_rate
        for start, factor in self.factors.items():
            rate *= factor if name.startswith(start) else 1.0
        is_matrix = self.parameters[name].ndim > 1 and "embedding" not in name
        return rate, self.options.weight_decay if is_matrix else 0.0

    def _has_kernel(self, weights: Tensor) -> bool:
        if self.options.has_kernel is not None:
            return self.options.has_kernel
        is_known = weights.dtype in (torch.float32, torch.bfloat16)
        return weights.is_cuda and is_known and find_spec("triton") is not None

    def _launch(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], scale: float, rate: float, decay: float
    ) -> None:
        from sottovoce.train import triton_adam

        seed = int(torch.randint(0, 1 << 31, ()))  # on the host: nothing waits
        triton_adam.step(
            weights, gradient, state, seed=seed, scale=scale, rate=rate, decay=decay, betas=self.options.betas,
            eps=self.options.eps, num_steps=self.num_steps,
        )  # fmt: skip

    def _update_chunk(
        self, weights: Tensor, slope: Tensor, state: dict[str, Tensor], part: slice, rate: float, decay: float
    ) -> None:
        beta1, beta2 = self.options.betas
        blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
        if "first_scale" in state:
            first = expand_signed(state["first"][part], state["first_scale"][blocks])
            second = expand_positive(state["second"][part], state["second_scale"][blocks])
        else:
            first, second = state["first"][part], state["second"][part]
        first.lerp_(slope, 1 - beta1)
        second.lerp_(slope.square_(), 1 - beta2)
        if "first_scale" in state:
            state["first"][part], state["first_scale"][blocks] = compress_signed(first)
            state["second"][part], state["second_scale"][blocks] = compress_positive(second)
        spread = (second / (1 - beta2**self.num_steps)).sqrt_().add_(self.options.eps)
        exact = state["master"][part] if "master" in state else weights[part].float()
        exact.mul_(1 - rate * decay).addcdiv_(first, spread, value=-rate / (1 - beta1**self.num_steps))
        if weights.dtype == torch.bfloat16 and "master" not in state:
            exact = round_stochastically(exact)
        weights[part] = exact.to(weights.dtype)


def round_stochastically(values: Tensor) -> Tensor:
    """float32 -> the bf16 number next to it on either side, the nearer the likelier, so that it is right on average.

    Draws from the device's default generator.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device)
    bits = (values.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)


# Moments in 8 bits: each block of numbers is scaled to 1, then stored as a root, which keeps small numbers apart: the
# square root of the first moment, the fourth root of the second. Rounded by chance, because a moment moves by less than
# a step of this scale at a time. Block-wise scales: Dettmers et al., 8-bit Optimizers (https://arxiv.org/abs/2110.02861).


def compress_signed(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n] -> int8 [n] and the scale of each block."""
    scaled, scale = _scaled(values)
    codes = _round((scaled.abs().sqrt_() * 127).view(-1)[: len(values)]).copysign_(values)
    return codes.to(torch.int8), scale


def expand_signed(codes: Tensor, scale: Tensor) -> Tensor:
    roots = codes.float() / 127
    return _unscaled(roots * roots.abs(), scale)


def compress_positive(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n], none negative -> uint8 [n] and the scale of each block. Only zero becomes zero: to lose a second
    moment beside a first one that is kept would make a huge step."""
    scaled, scale = _scaled(values)
    codes = _round((scaled.sqrt_().sqrt_() * 255).view(-1)[: len(values)])
    return torch.where(values > 0, codes.clamp_(min=1), codes).to(torch.uint8), scale


def expand_positive(codes: Tensor, scale: Tensor) -> Tensor:
    return _unscaled((codes.float() / 255).square_().square_(), scale)


def _scaled(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    return blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None], scale


def _unscaled(values: Tensor, scale: Tensor) -> Tensor:
    return values * scale.repeat_interleave(BLOCK)[: len(values)]


def _round(values: Tensor) -> Tensor:
    return (values + torch.rand_like(values)).floor_()
