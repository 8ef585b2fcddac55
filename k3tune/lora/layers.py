"""LoRA layers that PEFT manages: over a linear layer, and over a packed projection of experts.

Both hold FP32 factors (their own optimizer masters) and cast them where they are used; the base
below stays as it was loaded.

Shape letters: ``E`` local experts, ``R`` LoRA rank, ``I`` inputs, ``O`` outputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F

from k3tune.errors import AdapterError
from k3tune.lora.frozen_linear import FrozenLinearWithLora, add_update
from k3tune.lora.keys import Slot
from k3tune.lora.spec import FORMS, INITS, lora_scaling
from k3tune.model.latent_moe import PackedProjection
from k3tune.model.layers import KeepsDtype, without_autocast
from k3tune_kernels.moe_lora import LoraFactors, PackedWeight

_MERGE_REFUSED = (
    "the adapter cannot be merged into the base: the experts are stored in 4 bits, and a LoRA "
    "update is smaller than the step between two 4-bit values, so rounding W + scaling * B A back "
    "to MXFP4 would lose most of it; save_adapter(model, path) writes the adapter to be served "
    "beside the unchanged base"
)
# PEFT's names for the two ways to start A.
_INIT_OF_PEFT: dict[Any, str] = {True: "kaiming", "gaussian": "gaussian"}
# Containers of LoraLayer for embeddings, DoRA and its dropout modules.
_UNUSED_OF_PEFT = (
    "lora_dropout",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
)
# LoraConfig fields that change the mathematics, with the value that does not.
_PLAIN_FIELDS: dict[str, Any] = {"use_dora": False, "lora_bias": False, "bias": "none"}


class Factor(KeepsDtype):
    """One matrix of an adapter, FP32 whatever the model around it is cast to."""

    kept_parameters = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class AdapterLayer(nn.Module, LoraLayer):
    """What the two layers share: PEFT's life cycle over :class:`Factor` pairs.

    PEFT keeps what belongs to an adapter in dicts by its name; beside its own there are
    ``slots`` (the file's entries, where they are not k3tune's own) for :mod:`k3tune.lora.state`.
    """

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names: tuple[str, ...] = (
        "r",
        "lora_alpha",
        "scaling",
        "dropout",
        "use_rslora",
        "slots",
    )

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int,
        lora_alpha: float,
        **_: Any,
    ) -> None:
        nn.Module.__init__(self)
        LoraLayer.__init__(self, base_layer)
        # PEFT guesses from the names of submodules which hold factors and need to be moved to the
        # base's device: nothing but A and B may look like one.
        for name in _UNUSED_OF_PEFT:
            delattr(self, name)
            setattr(self, name, {})
        self.dropout: dict[str, float] = {}
        self.slots: dict[str, tuple[Slot, ...]] = {}
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config)

    def update_layer(
        self, adapter_name: str, r: int, lora_alpha: float, config: LoraConfig, **_: Any
    ) -> None:
        """Add an adapter as PEFT asks for it: PEFT's start of A, B = 0, an A and a B an expert.

        Raises:
            AdapterError: for a variant of LoRA that these layers do not compute.
        """
        for field, plain in _PLAIN_FIELDS.items():
            if getattr(config, field) != plain:
                raise AdapterError(
                    f"{field} is {getattr(config, field)!r}, expected {plain!r}: K3's layers "
                    "compute plain LoRA only"
                )
        init = _INIT_OF_PEFT.get(config.init_lora_weights)
        if init is None:
            raise AdapterError(
                f"init_lora_weights is {config.init_lora_weights!r}, expected true (kaiming) or "
                "'gaussian': other starts read or change the base's weights"
            )
        for half, factors in (("A", self.lora_A), ("B", self.lora_B)):
            shape = self.factor_shape(half, r)
            weight = torch.empty(shape, dtype=torch.float32, device=self.base_device)
            factors[adapter_name] = Factor(weight)
        A, B = self.factor(adapter_name, "A"), self.factor(adapter_name, "B")
        # under PEFT's low_cpu_mem_usage both are on the meta device now, to be set later
        if not A.is_meta:
            fill_A(A.data, init, r)
            B.data.zero_()
        self.dropout[adapter_name] = config.lora_dropout
        self.describe(adapter_name, r, lora_alpha, use_rslora=config.use_rslora)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def describe(self, adapter_name: str, rank: int, alpha: float, *, use_rslora: bool) -> None:
        """Set an adapter's rank, alpha and scale."""
        self.r[adapter_name], self.lora_alpha[adapter_name] = rank, alpha
        self.use_rslora[adapter_name] = use_rslora
        self.scaling[adapter_name] = lora_scaling(alpha, rank, use_rslora)

    def factor(self, adapter_name: str, half: str) -> nn.Parameter:
        """An adapter's ``"A"`` or ``"B"``."""
        module = (self.lora_A if half == "A" else self.lora_B)[adapter_name]
        assert isinstance(module, Factor), f"{type(module)=}"
        return module.weight

    def set_factors(self, adapter_name: str, A: Tensor, B: Tensor) -> None:
        """Replace an adapter's factors, of any rank, moved to the base's device."""
        for factors, value in ((self.lora_A, A), (self.lora_B, B)):
            module = factors[adapter_name]
            trained = module.get_parameter("weight").requires_grad
            module.weight = nn.Parameter(value.to(self.base_device), requires_grad=trained)

    @contextmanager
    def standing_in(self, adapter_name: str, A: Tensor, B: Tensor) -> Iterator[None]:
        """Apply an adapter with other values, whichever is active; then all is as it was.

        Args:
            adapter_name: one this layer holds.
            A, B: FP32, of the factors' shapes, on their device.
        """
        parameters = [self.factor(adapter_name, half) for half in "AB"]
        held = [parameter.data for parameter in parameters]
        state = self._active_adapter, self._disable_adapters
        try:
            self._active_adapter, self._disable_adapters = [adapter_name], False
            for parameter, value in zip(parameters, (A, B), strict=True):
                parameter.data = value
            yield
        finally:
            self._active_adapter, self._disable_adapters = state
            for parameter, value in zip(parameters, held, strict=True):
                parameter.data = value

    @property
    def base_device(self) -> torch.device:
        """Where the base's weight is, and factors belong."""
        base = self.get_base_layer()
        # not by its parameters: where the trunk is sharded a linear layer has none
        if isinstance(base, PackedProjection):
            return base.packed.device
        assert isinstance(base, nn.Linear), f"{type(base)=}"
        return base.weight.device

    def factor_shape(self, half: str, rank: int, *, shared: bool = False) -> tuple[int, ...]:
        """Shape of A or B."""
        assert self.in_features and self.out_features, f"{self.in_features=} {self.out_features=}"
        return (rank, self.in_features) if half == "A" else (self.out_features, rank)

    def applied_adapter(self) -> str | None:
        """The adapter a forward adds; None if there is none here or adapters are disabled."""
        if self.disable_adapters:
            return None
        for name in self.active_adapters:
            if name in self.lora_A:
                return name
        return None

    def set_adapter(self, adapter_names: str | Sequence[str], inference_mode: bool = False) -> None:
        """Make an adapter the one that is applied.

        Raises:
            AdapterError: for more than one; the experts' op adds one pair of factors.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        if len(names) > 1:
            raise AdapterError(
                f"adapters {', '.join(names)} were to be active together, expected one: K3's "
                "experts add one adapter at a time"
            )
        super().set_adapter(names, inference_mode=inference_mode)

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapters on or off, leaving alone which of them are trained.

        PEFT's own would, on the way back, make an adapter loaded for inference trainable.
        """
        self._disable_adapters = not enabled

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused.

        Raises:
            AdapterError: always, with the reason.
        """
        raise AdapterError(_MERGE_REFUSED)

    def unmerge(self) -> None:
        """Nothing to do: nothing is ever merged."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # PEFT's own warns about module classes it does not know
        assert isinstance(module, nn.Linear | PackedProjection), f"{type(module)=}"
        return module.in_features, module.out_features


class LoraLinear(AdapterLayer):
    """``base(x) + scaling * B A x``, A ``[R, I]`` and B ``[O, R]`` cast to the base's output."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I]`` to ``[..., O]``, in the dtype the base answers in."""
        name = self.applied_adapter()
        if name is None:
            return self.base_layer(x)
        A: Tensor = self.factor(name, "A")
        B: Tensor = self.factor(name, "B")
        dropout = self.dropout[name] if self.training else 0.0
        plain = not dropout and A.dtype == B.dtype and _is_its_product_alone(self.base_layer)
        if plain and torch.is_grad_enabled() and self._trains_in_place(x, A):
            return FrozenLinearWithLora.apply(x, A, B, self.base_layer, self.scaling[name])
        y = self.base_layer(x)
        if plain and not torch.is_grad_enabled() and y.dtype == A.dtype:
            # decoding is many small products: y is nobody else's, and each call counts
            add_update(y, x.to(y.dtype), A, B, self.scaling[name])
            return y
        x = F.dropout(x, dropout, self.training).to(y.dtype)
        with without_autocast(x):
            A, B = A.to(y.dtype), B.to(y.dtype)
            return y + F.linear(F.linear(x, A) * self.scaling[name], B)

    def _trains_in_place(self, x: Tensor, A: Tensor) -> bool:
        """Whether a training step may take the shorter way: one dtype, a frozen base, a CPU."""
        base = self.base_layer
        return (
            x.is_cpu
            and not torch.is_autocast_enabled("cpu")
            and base.bias is None
            and not base.weight.requires_grad
            and x.dtype == base.weight.dtype == A.dtype
        )


def _is_its_product_alone(base: nn.Module) -> bool:
    """Whether a layer's result is nobody else's to keep, change or differentiate."""
    hooks = (
        base._forward_hooks,
        base._forward_pre_hooks,
        base._backward_hooks,
        base._backward_pre_hooks,
    )
    return type(base) is nn.Linear and "forward" not in base.__dict__ and not any(hooks)


class LoraPackedProjection(AdapterLayer):
    """LoRA of one projection of all local experts, for the op the projections share.

    A is ``[E or 1, R, I]`` and B ``[E or 1, O, R]``. Where experts differ in rank or alpha,
    ``expert_ranks`` and ``expert_alphas`` hold one value a row (rank 0: not adapted), and the
    factors are padded with zeros, which stay zero: their gradient is zero.
    """

    other_param_names: tuple[str, ...] = (
        *AdapterLayer.other_param_names,
        "expert_ranks",
        "expert_alphas",
        "expert_scaling",
        "shared",
    )

    def __init__(self, base_layer: PackedProjection, *args: Any, **kwargs: Any) -> None:
        # read by factor_shape while the start below adds the first adapter
        self.num_experts = base_layer.num_experts
        super().__init__(base_layer, *args, **kwargs)
        self.expert_ranks: dict[str, tuple[int, ...]] = {}
        self.expert_alphas: dict[str, tuple[float, ...]] = {}
        self.expert_scaling: dict[str, Tensor] = {}
        # "A", "B" or both: one matrix for all experts, also where a process has one expert only
        self.shared: dict[str, str] = {}

    @property
    def weight(self) -> PackedWeight:  # type: ignore[override]
        """The base's bytes."""
        base = self.get_base_layer()
        assert isinstance(base, PackedProjection), f"{type(base)=}"
        return base.weight

    @property
    def factors(self) -> LoraFactors | None:
        """Factors of the active adapter; None if there is none here or adapters are disabled."""
        name = self.applied_adapter()
        if name is None:
            return None
        A, B = self.factor(name, "A"), self.factor(name, "B")
        if name not in self.expert_scaling:
            return LoraFactors(A, B, self.scaling[name])
        # a plain tensor: casts of the model leave it alone, a move reaches it here
        self.expert_scaling[name] = self.expert_scaling[name].to(A.device)
        return LoraFactors(A, B, self.expert_scaling[name])

    def describe_experts(
        self, adapter_name: str, ranks: Sequence[int], alphas: Sequence[float]
    ) -> None:
        """Set rank and alpha of each row; drops them where all rows are as the module's."""
        same = set(ranks) == {self.r[adapter_name]}
        if same and set(alphas) == {self.lora_alpha[adapter_name]}:
            return
        self.expert_ranks[adapter_name] = tuple(ranks)
        self.expert_alphas[adapter_name] = tuple(alphas)
        rslora = self.use_rslora[adapter_name]
        scaling = [
            lora_scaling(alpha, rank, rslora) if rank else 0.0
            for rank, alpha in zip(ranks, alphas, strict=True)
        ]
        self.expert_scaling[adapter_name] = torch.tensor(scaling, device=self.base_device)

    def form(self, adapter_name: str) -> str:
        """Name of :data:`~k3tune.lora.spec.FORMS` the adapter has here."""
        return FORMS[bool(self.shared.get(adapter_name))]

    def factor_shape(self, half: str, rank: int, *, shared: bool = False) -> tuple[int, ...]:
        """Shape of A or B, for each local expert or shared by all."""
        return (1 if shared else self.num_experts, *super().factor_shape(half, rank))


def fill_A(A: Tensor, init: str, rank: int, generator: torch.Generator | None = None) -> None:
    """Draw the start of A in place.

    Args:
        A: ``[..., R, I]``.
        init: ``"kaiming"`` or ``"gaussian"``, as in :class:`~k3tune.lora.spec.LoraSpec`.
        rank: for the spread of ``"gaussian"``.
        generator: on A's device; None is torch's own.
    """
    assert init in INITS, f"{init=}"
    if init == "gaussian":
        A.normal_(std=1 / rank, generator=generator)
    else:
        bound = A.shape[-1] ** -0.5
        A.uniform_(-bound, bound, generator=generator)
