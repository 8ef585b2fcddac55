"""What an export writes: which modules, in which form, with which rank, scale and dtype."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from k3tune.errors import AdapterError
from k3tune.lora.export.capabilities import Engine, Target
from k3tune.lora.export.factors import AdapterSource, ModuleFactors
from k3tune.lora.export.written import Layout, WrittenModule
from k3tune.lora.keys import FactorName
from k3tune.lora.modules import ModuleShape
from k3tune.lora.plan import listed
from k3tune.lora.spec import FORMS, GROUPS, lora_scaling, pattern_matches
from k3tune.lora.targets import RankAlpha, near_names

# The half of a stacked projection that lies on the latent's side, which shared-outer experts share.
SHARED_HALF = {"w1": "A", "w3": "A", "w2": "B"}
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float64,
    torch.float64: torch.float64,
}


def plan_layout(
    source: AdapterSource,
    engine: Engine,
    *,
    form: str | None,
    drop: Sequence[str],
    dtype: torch.dtype | None,
) -> Layout:
    """Decide what to write.

    Args:
        source: the adapter.
        engine: who reads the result.
        form: of the experts' factors; None is the source's, where the engine reads it.
        drop: target groups or patterns of module names to leave out.
        dtype: of the factors; None keeps each as it is stored.

    Raises:
        AdapterError: for a target, form or rank the engine does not take.
    """
    kept, dropped = _without_dropped(source, drop)
    _refuse_targets(kept, engine)
    layout = Layout(engine, _chosen_form(source, kept, engine, form), dropped=dropped)
    layout.use_rslora = source.files.config.use_rslora and engine.one_scale != "adapter"
    stacked = layout.form == "shared_outer"
    common = _adapter_size(source, kept) if engine.one_scale == "adapter" else None
    for name, factors in kept.items():
        layout.modules.append(_written(source, name, factors, layout, stacked, common, dtype))
    _complete_sets(layout, source)
    _check_rank(layout)
    _describe(layout, source)
    return layout


def _without_dropped(
    source: AdapterSource, drop: Sequence[str]
) -> tuple[dict[str, ModuleFactors], dict[str, list[str]]]:
    kept, dropped = dict(source.modules), {}
    for target in drop:
        pattern = GROUPS.get(target, target)
        names = [name for name in source.modules if pattern_matches(pattern, name)]
        if not names:
            ends = [name.rpartition(".")[2] for name in source.modules]
            raise AdapterError(
                f"drop names {target!r}, which fits no module of the adapter; near names: "
                f"{', '.join(near_names(target, [*GROUPS, *ends]))}"
            )
        dropped[target] = names
        for name in names:
            kept.pop(name, None)
    if not kept:
        raise AdapterError("drop names every module of the adapter, which leaves nothing to write")
    return kept, dropped


def target_of(engine: Engine, name: str) -> Target:
    """How an engine treats a module."""
    for target in engine.targets:
        if pattern_matches(target.pattern, name):
            return target
    return Target(name, "refused", "it is not known to take an adapter")


def _refuse_targets(modules: Mapping[str, ModuleFactors], engine: Engine) -> None:
    problems: dict[str, tuple[Target, list[str]]] = {}
    for name in modules:
        target = target_of(engine, name)
        if target.outcome != "served":
            leaf = name.rpartition(".")[2]
            problems.setdefault(leaf, (target, []))[1].append(name)
    if not problems:
        return
    said = "; ".join(
        f"{leaf} ({len(names)} modules, {names[0]}) is {target.outcome}: {target.reason}"
        for leaf, (target, names) in problems.items()
    )
    raise AdapterError(
        f"{engine.label} does not serve {len(problems)} of the adapter's targets: {said}. "
        f"To leave them out: --drop {','.join(problems)}"
    )


def _chosen_form(
    source: AdapterSource,
    modules: Mapping[str, ModuleFactors],
    engine: Engine,
    form: str | None,
) -> str | None:
    if form is not None and form not in FORMS:
        raise AdapterError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
    if form is not None and form not in engine.forms:
        raise AdapterError(
            f"form is {form}, expected {' or '.join(engine.forms)} for {engine.label}: its readers "
            "know an expert by its own 2-D keys, not as a row of a stack"
        )
    found = {factors.form for factors in modules.values()} - {None}
    if not found:
        return None
    if form is None:
        form = "shared_outer" if found == {"shared_outer"} else "per_expert"
        return form if form in engine.forms else "per_expert"
    if form == "shared_outer":
        for name, factors in modules.items():
            if factors.form is not None:
                check_shared(name, factors, SHARED_HALF[name.rpartition(".")[2]])
    return form


def check_shared(name: str, factors: ModuleFactors, half: str) -> None:
    """Refuse to write one matrix for experts whose own differ.

    Raises:
        AdapterError: naming the first pair that differs.
    """
    if factors.halves[half].shared:
        return
    first, *others = factors.adapted
    read = factors.halves[half].read
    expected = read(first)
    for expert in others:
        found = read(expert)
        if found.shape != expected.shape:
            detail = f"{list(expected.shape)} and {list(found.shape)}"
        elif not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            row, column = (int(place) for place in (found != expected).nonzero()[0])
            detail = (
                f"first at [{row}, {column}]: {expected[row, column].item():g} and "
                f"{found[row, column].item():g}"
            )
        else:
            continue
        raise AdapterError(
            f"{name}: lora_{half} of expert {first} and of expert {expert} differ ({detail}), so "
            "this per-expert adapter cannot be written stacked: a server keeps one matrix for all "
            "experts there (vLLM silently expert 0's); use form per_expert"
        )


def _adapter_size(source: AdapterSource, modules: Mapping[str, ModuleFactors]) -> RankAlpha:
    """One rank and alpha for all: the largest rank, the commonest scale."""
    rank = max(factors.size.rank for factors in modules.values())
    scales = Counter(
        source.scaling(name, expert)
        for name, factors in modules.items()
        for expert in set(factors.experts) or (None,)
    )
    [(scale, _)] = scales.most_common(1)
    if not source.files.config.use_rslora:
        for factors in modules.values():
            size = factors.size
            if size.rank == rank and lora_scaling(size.alpha, rank, False) == scale:
                return size
    return RankAlpha(rank, scale * rank)


def _written(
    source: AdapterSource,
    name: str,
    factors: ModuleFactors,
    layout: Layout,
    stacked: bool,
    common: RankAlpha | None,
    dtype: torch.dtype | None,
) -> WrittenModule:
    stacked = stacked and factors.form is not None
    shared = SHARED_HALF[name.rpartition(".")[2]] if stacked else ""
    folded = "A" if shared == "B" else "B"
    own = layout.engine.one_rank == "none"
    sizes = dict(factors.experts) if own else {}
    size, folds = factors.size, {}
    if common is not None:
        size = common
    elif not own:
        size = _projection_size(source, name, factors)
    if not own:
        scale = lora_scaling(size.alpha, size.rank, layout.use_rslora)
        for expert in factors.adapted:
            fold = source.scaling(name, expert) / scale
            # alphas that were divided and multiplied by the same ranks are equal but for rounding
            if not math.isclose(fold, 1, rel_tol=1e-12):
                folds[expert] = fold
    elif sizes and set(sizes.values()) == {size} and len(sizes) == factors.shape.num_experts:
        sizes = {}
    dtypes = {half: dtype or found.dtype for half, found in factors.halves.items()}
    if dtype is None and any(not _is_power_of_two(fold) for fold in folds.values()):
        dtypes[folded] = _WIDER[dtypes[folded]]
    return WrittenModule(
        name, factors.shape, factors, shared, stacked, size, sizes, folds, folded, dtypes
    )


def _projection_size(source: AdapterSource, name: str, factors: ModuleFactors) -> RankAlpha:
    """One rank and alpha for a layer's experts: the largest rank, the commonest scale."""
    if not factors.experts:
        return factors.size
    rslora = source.files.config.use_rslora
    rank = factors.size.rank
    scales = Counter(source.scaling(name, expert) for expert in factors.experts)
    [(scale, _)] = scales.most_common(1)
    for expert, size in factors.experts.items():
        if size.rank == rank and source.scaling(name, expert) == scale:
            return size
    return RankAlpha(rank, scale * (math.sqrt(rank) if rslora else rank))


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


def _complete_sets(layout: Layout, source: AdapterSource) -> None:
    """Add the modules and experts the engine asserts, as zeros."""
    engine = layout.engine
    if engine.all_experts:
        for module in layout.modules:
            assert module.source is not None, f"{module.name=}"
            missing = set(module.experts) - set(module.source.adapted)
            for owner in (FactorName(module.name, e, "A").owner for e in sorted(missing, key=str)):
                layout.zeros[owner] = f"{engine.label} needs every expert beside one that is there"
    parents: dict[str, dict[str, WrittenModule]] = {}
    for module in layout.modules:
        parent, _, leaf = module.name.rpartition(".")
        parents.setdefault(parent, {})[leaf] = module
    for parent, leaves in parents.items():
        for group in engine.together:
            present = [leaf for leaf in group.names if leaf in leaves]
            for leaf in group.names if present else ():
                if leaf not in leaves:
                    name = f"{parent}.{leaf}"
                    layout.modules.append(_zero_module(name, leaves[present[0]], layout, source))
                    layout.zeros[name] = f"{engine.label}: {group.why}"


def _zero_module(
    name: str, twin: WrittenModule, layout: Layout, source: AdapterSource
) -> WrittenModule:
    shape = _missing_shape(name, twin, source)
    shared = SHARED_HALF[name.rpartition(".")[2]] if twin.stacked else ""
    dtypes = dict.fromkeys("AB", next(iter(twin.dtypes.values())))
    return WrittenModule(name, shape, None, shared, twin.stacked, twin.size, {}, {}, "B", dtypes)


def _missing_shape(name: str, twin: WrittenModule, source: AdapterSource) -> ModuleShape:
    """Shape of a module the adapter lacks: from the base, its like in other layers, its twin."""
    leaf = name.rpartition(".")[2]
    twin_leaf = twin.name.rpartition(".")[2]
    if name in source.shapes:
        return source.shapes[name]
    for other, shape in source.shapes.items():
        if re.sub(r"\d+", "", other) == re.sub(r"\d+", "", name):
            return shape
    if "w2" in (leaf, twin_leaf):
        return ModuleShape(twin.shape.out_features, twin.shape.in_features, twin.shape.num_experts)
    if {leaf, twin_leaf} & {"w1", "w3", "gate_proj", "up_proj"}:
        return twin.shape
    raise AdapterError(
        f"{name} must be written beside {twin_leaf}, and nothing in the adapter tells its size: "
        "name the base (--base), whose config does"
    )


def _check_rank(layout: Layout) -> None:
    values = layout.engine.max_rank_values
    if values and layout.rank > values[-1]:
        raise AdapterError(
            f"the adapter's rank is {layout.rank}, expected at most {values[-1]}: "
            f"{layout.engine.label} takes --max-lora-rank of {', '.join(map(str, values))}"
        )


def _describe(layout: Layout, source: AdapterSource) -> None:
    """Say in sentences what is not written as it was."""
    engine, config = layout.engine, source.files.config
    padded = [m.name for m in layout.modules if _is_padded(m)]
    folded = [m.name for m in layout.modules if m.folds]
    widened = [m.name for m in layout.modules if m.source and _is_widened(m)]
    expanded = [m.name for m in layout.modules if m.source and _is_expanded(m)]
    if padded:
        layout.changes.append(
            f"ranks of {len(padded)} modules padded with zeros to the rank {engine.label} asks "
            f"of {'all' if engine.one_rank == 'adapter' else 'a layer'}: {listed(padded)}"
        )
    if config.use_rslora and not layout.use_rslora:
        layout.changes.append(
            f"rsLoRA folded: {engine.label} reads lora_alpha / r alone, so lora_alpha is "
            f"{layout.modules[0].size.alpha:g} for r {layout.modules[0].size.rank}"
        )
    if folded:
        factors = sorted({fold for m in layout.modules for fold in m.folds.values()})
        layout.changes.append(
            f"scales of {len(folded)} modules folded into their factors (times "
            f"{', '.join(f'{factor:g}' for factor in factors[:5])}), as {engine.label} reads one "
            f"scale for {'all' if engine.one_scale == 'adapter' else 'a projection'}: "
            f"{listed(folded)}"
        )
    if widened:
        layout.changes.append(
            f"{len(widened)} of them written in a wider dtype, in which the product keeps every "
            f"bit: {listed(widened)}"
        )
    if expanded:
        layout.changes.append(
            f"shared factors of {len(expanded)} modules repeated for every expert: "
            f"{listed(expanded)}"
        )


def _is_padded(module: WrittenModule) -> bool:
    if module.source is None:
        return False
    return any(
        module.source.size_of(e).rank < module.size.rank
        for e in module.source.adapted
        if e not in module.sizes
    )


def _is_widened(module: WrittenModule) -> bool:
    assert module.source is not None, f"{module.name=}"
    stored = module.source.halves[module.folded].dtype
    return bool(module.folds) and module.dtypes[module.folded].itemsize > stored.itemsize


def _is_expanded(module: WrittenModule) -> bool:
    assert module.source is not None, f"{module.name=}"
    return module.source.form == "shared_outer" and not module.stacked
