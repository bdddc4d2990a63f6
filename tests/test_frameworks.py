"""Trainer, Lightning, accelerate, axolotl, timm, containers, schedulers: steps as in a plain loop, and checkpoints.

The frameworks are not in the `dev` extra; each test is skipped where its framework is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

from blockmean import AdamBMA, Anova, NaturalGradientBMA, diagnose, param_groups
from blockmean.plot import CouplingRecorder
from support.optimizers import CLASSES, Net, assert_same, every_class, loss_of, params_of, stripes, train
from support.scripts import import_or_skip, load_script

RECIPES = Path(__file__).parent.parent / "examples" / "recipes"
pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to fix
STEPS = 4


class Batches(torch.utils.data.Dataset):
    """Numbers of batches: `loss_of` makes the batch."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, t: int) -> torch.Tensor:
        return torch.tensor(t)


# ---------------------------------------------------------------- accelerate


@pytest.fixture
def accelerate() -> ModuleType:
    return import_or_skip("accelerate")


@every_class
def test_a_prepared_optimizer_takes_the_steps_of_a_plain_loop(case: Any, accelerate: ModuleType):
    plain, model = Net(), Net()
    train(plain, case(param_groups(plain, 0.1)), STEPS)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, case(param_groups(model, 0.1)))
    for t in range(STEPS):
        accelerator.backward(loss_of(prepared, t))
        optimizer.step()
        optimizer.zero_grad()
    assert_same(params_of(model), params_of(plain))


@every_class
def test_accelerate_saves_and_loads_the_whole_state(case: Any, accelerate: ModuleType, tmp_path: Path):
    plain, model, other = Net(), Net(), Net(seed=1)
    train(plain, case(param_groups(plain, 0.1)), STEPS)
    first = accelerate.Accelerator(cpu=True)
    prepared, optimizer = first.prepare(model, case(param_groups(model, 0.1)))
    train(prepared, optimizer, 2)
    first.save_state(str(tmp_path / "state"))
    second = accelerate.Accelerator(cpu=True)
    prepared, optimizer = second.prepare(other, case(param_groups(other, 0.1)))
    second.load_state(str(tmp_path / "state"))
    train(prepared, optimizer, range(2, STEPS))
    assert_same(params_of(other), params_of(plain))


@every_class
def test_accelerate_knows_which_steps_its_scaler_has_left_out(case: Any, accelerate: ModuleType):
    plain, model = Net(), Net()
    own, by_hand = case(param_groups(model, 0.1)), case(param_groups(plain, 0.1))
    accelerate.Accelerator(cpu=True)  # the wrapper below asks for its state
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(own, device_placement=False, scaler=scaler)
    for t in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, t)).backward()
        if t == 2:
            model.head.weight.grad[0, 0] = torch.inf
        optimizer.step()
        assert optimizer.step_was_skipped == (t == 2)
        if t != 2:
            train(plain, by_hand, range(t, t + 1))
    assert_same(params_of(model), params_of(plain))  # the scale is a power of two: no rounding
    assert own.skipped_steps == 0


def test_blocks_that_only_the_model_knows_survive_prepare(accelerate: ModuleType):
    model = nn.Sequential(nn.ConvTranspose2d(3, 2, 2))
    optimizer = AdamBMA(param_groups(model), partition=lambda name, param: stripes(name, param))
    known = list(optimizer._layouts[0].names)
    _, prepared = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    model(torch.rand(1, 3, 2, 2)).square().sum().backward()
    prepared.step()
    assert optimizer._layouts[0].names == known


def test_what_looks_at_an_optimizer_looks_through_its_wrapper(accelerate: ModuleType):
    model = Net()
    _, optimizer = accelerate.Accelerator(cpu=True).prepare(model, AdamBMA(param_groups(model)))
    with CouplingRecorder(optimizer, every=2) as recorder:
        train(model, optimizer, STEPS)
    assert recorder.history[0]["steps"] == [2, 4]
    assert diagnose(optimizer).steps == STEPS


# ---------------------------------------------------------------- Lightning


def lightning_module(case: Any, model: Net) -> Any:
    lightning = import_or_skip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return loss_of(self.net, int(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return case(param_groups(self, 0.1))

    return Module()


def fit(module: Any, folder: Path, epochs: int = 1, resume: Path | None = None, **options: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, **quiet, **options
    )
    trainer.fit(
        module, DataLoader(Batches(), batch_size=1), ckpt_path=resume, **({"weights_only": False} if resume else {})
    )
    return trainer


@every_class
def test_lightning_takes_the_steps_of_a_plain_loop_through_its_closure(case: Any, tmp_path: Path):
    plain, model = Net(), Net()
    module = lightning_module(case, model)
    train(plain, case(param_groups(plain, 0.1)), STEPS)
    fit(module, tmp_path)
    assert_same(params_of(model), params_of(plain))
    assert module.optimizers().optimizer.skipped_steps == 0


@every_class
def test_lightning_resumes_from_its_checkpoint(case: Any, tmp_path: Path):
    whole, model, other = Net(), Net(), Net(seed=1)
    fit(lightning_module(case, whole), tmp_path, epochs=2)
    trainer = fit(lightning_module(case, model), tmp_path)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(lightning_module(case, other), tmp_path, epochs=2, resume=tmp_path / "half.ckpt")
    assert_same(params_of(other), params_of(whole))


def test_an_adaptable_damping_runs_the_training_step_twice_per_batch(tmp_path: Path):
    module = lightning_module(lambda params: NaturalGradientBMA(params, lr=0.01, adapt_damping=True), Net())
    seen: list[int] = []
    module.net.register_forward_hook(lambda *_: seen.append(1))
    assert fit(module, tmp_path).global_step == STEPS
    assert len(seen) == 2 * STEPS
    assert module.optimizers().param_groups[0]["damping"] != module.optimizers().defaults["damping"]


def test_lightning_clips_accumulates_and_casts(tmp_path: Path):
    model = Net()
    case = next(case for case in CLASSES if case.cls is Anova)
    before = params_of(model)
    module = lightning_module(case, model)
    fit(module, tmp_path, gradient_clip_val=0.1, accumulate_grad_batches=2, precision="bf16-mixed")
    assert not any(torch.equal(a, b) for a, b in zip(before, params_of(model), strict=True))
    assert {float(state["step"]) for state in module.optimizers().state.values()} == {STEPS // 2}


# ---------------------------------------------------------------- Trainer


class WithLoss(nn.Module):
    """A model as Trainer wants it: it returns its loss."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = Net(seed)

    def forward(self, t: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, int(t[0]))}


class Numbered(Batches):
    def __getitem__(self, t: int) -> dict[str, int]:  # type: ignore[override]
        return {"t": t}


def trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    transformers = import_or_skip("transformers")
    import_or_skip("accelerate")
    settings = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=0,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder(model, settings, train_dataset=Numbered(), **options)


@every_class
def test_trainer_takes_an_optimizer_and_the_steps_of_a_plain_loop(case: Any, tmp_path: Path):
    plain, model = WithLoss(), WithLoss()
    train(plain.net, case(param_groups(plain, 0.1)), STEPS)
    trainer(model, tmp_path, optimizers=(case(param_groups(model, 0.1)), None)).train()
    assert_same(params_of(model), params_of(plain))


@every_class
def test_trainer_makes_an_optimizer_from_its_class(case: Any, tmp_path: Path):
    plain, model = WithLoss(), WithLoss()
    run = trainer(model, tmp_path, optimizer_cls_and_kwargs=(case.cls, {"lr": 0.05, **case.options}))
    run.train()
    assert type(run.optimizer.optimizer) is case.cls
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0]
    decayed = [param for name, param in plain.named_parameters() if "bias" not in name]  # Trainer's rule
    others = [param for name, param in plain.named_parameters() if "bias" in name]
    train(plain.net, case([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]), STEPS)
    assert_same(params_of(model), params_of(plain))


@every_class
def test_trainer_resumes_from_its_checkpoint(case: Any, tmp_path: Path):
    model, other = WithLoss(), WithLoss(seed=1)
    run = trainer(model, tmp_path, optimizers=(case(param_groups(model, 0.1)), None))
    run.train()
    again = trainer(other, tmp_path / "again", optimizers=(case(param_groups(other, 0.1)), None))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == STEPS
    assert_same(params_of(other), params_of(model))


def test_trainer_takes_groups_with_names_from_the_model(tmp_path: Path):
    plain, model = WithLoss(), WithLoss()
    train(plain.net, Anova(param_groups(plain, 0.1), lr=0.05), STEPS)
    run = trainer(model, tmp_path, optimizer_cls_and_kwargs=(Anova, {"params": param_groups(model, 0.1), "lr": 0.05}))
    run.train()
    assert run.optimizer.param_groups[0]["param_names"] == ["net.conv.weight", "net.head.weight"]
    assert_same(params_of(model), params_of(plain))


def test_the_weights_of_gpt2_are_cut_along_their_outputs():
    transformers = import_or_skip("transformers")
    config = transformers.GPT2Config(vocab_size=7, n_positions=5, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = AdamBMA(param_groups(model, 0.1))
    rows = torch.arange(5)[None]
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    counts: dict[str, int] = {}
    for statistics in optimizer.block_statistics():
        for parameter in statistics.parameters:
            counts[parameter] = counts.get(parameter, 0) + 1
    assert counts["transformer.h.0.attn.c_attn.weight"] == 12  # stored as (4, 12): twelve outputs
    assert counts["transformer.wte.weight"] == 7
    assert "lm_head.weight" not in counts  # tied to wte
    decayed = optimizer.param_groups[0]["param_names"]
    assert decayed and all(name.endswith("weight") and ".ln_" not in name for name in decayed)
    assert not any("wte" in name or "wpe" in name for name in decayed)


# ---------------------------------------------------------------- axolotl, by the Trainer that it builds on


def test_the_plugin_for_axolotl_gives_its_optimizer_to_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    by_class, by_plugin = WithLoss(), WithLoss()
    trainer(by_class, tmp_path / "class", optimizer_cls_and_kwargs=(Anova, {"lr": 0.05})).train()
    run = trainer(by_plugin, tmp_path / "plugin")
    if importlib.util.find_spec("axolotl") is None:  # its base class has methods that do nothing
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = object  # type: ignore[attr-defined]
    plugin = load_script(RECIPES / "axolotl_plugin.py").AnovaPlugin()
    plugin.post_trainer_create(SimpleNamespace(learning_rate=0.05), run)
    run.train()
    assert type(run.optimizer.optimizer) is Anova
    assert_same(params_of(by_plugin), params_of(by_class))


# ---------------------------------------------------------------- timm


@pytest.fixture
def anova_in_timm() -> Iterator[ModuleType]:
    timm = import_or_skip("timm")
    registry = importlib.import_module("timm.optim._optim_factory").default_registry
    registry.register(timm.optim.OptimInfo("anova", Anova, has_betas=True))
    yield timm.optim
    del registry._optimizers["anova"]


def test_timm_makes_a_registered_optimizer_with_its_own_groups(anova_in_timm: ModuleType):
    plain, model = Net(), Net()
    optimizer = anova_in_timm.create_optimizer_v2(model, "anova", lr=0.05, weight_decay=0.1, betas=(0.8, 0.9))
    assert type(optimizer) is Anova
    weights = [param for param in plain.parameters() if param.ndim > 1]
    others = [param for param in plain.parameters() if param.ndim < 2]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}]
    train(plain, Anova(groups, lr=0.05, betas=(0.8, 0.9)), STEPS)
    train(model, optimizer, STEPS)
    assert_same(params_of(model), params_of(plain))


def test_timm_takes_our_groups_with_names(anova_in_timm: ModuleType):
    optimizer = anova_in_timm.create_optimizer_v2(
        Net(), "anova", lr=0.05, param_group_fn=lambda model: param_groups(model, 0.1)
    )
    assert optimizer.param_groups[0]["param_names"] == ["conv.weight", "head.weight"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


# ---------------------------------------------------------------- a container such as torchtitan's


def container_of(*seeds: int, **options: Any) -> Any:
    """The recipe's container, with one net for each seed, and with the options that torchtitan sets."""
    make = load_script(RECIPES / "torchtitan_container.py").Container
    parts = [nn.ModuleDict({f"part{i}": Net(seed)}) for i, seed in enumerate(seeds)]
    return make(parts, **{"lr": 0.05, "means": 2, "fused": True, "foreach": False, **options})


def train_parts(container: Any, steps: range) -> None:
    for part, optimizer in container.pairs:
        (net,) = part.values()
        train(net, optimizer, steps)


def params_of_parts(container: Any) -> list[torch.Tensor]:
    return [param for part, _ in container.pairs for param in params_of(part)]


def test_a_container_saves_one_checkpoint_and_goes_on_bit_by_bit(tmp_path: Path):
    whole, first, fresh = container_of(0, 1), container_of(0, 1), container_of(2, 3)
    train_parts(whole, range(6))
    train_parts(first, range(4))
    dcp.save({"optimizer": first}, checkpoint_id=tmp_path)
    assert "state.part0.head.weight.exp_avg" in first.state_dict()  # names, as in the model
    for (to, _), (part, _) in zip(fresh.pairs, first.pairs, strict=True):
        to.load_state_dict(part.state_dict())
    dcp.load({"optimizer": fresh}, checkpoint_id=tmp_path)  # after a step with zero gradients and lr=0
    assert_same(params_of_parts(fresh), params_of_parts(first))
    train_parts(fresh, range(4, 6))
    assert_same(params_of_parts(fresh), params_of_parts(whole))
    assert all(group["fused"] and group["foreach"] is False for _, one in fresh.pairs for group in one.param_groups)


def test_a_container_that_was_asked_for_its_state_before_training_trains_as_well():
    """DCP then takes a step with zero gradients and lr=0, which counts: bias corrections begin one step later."""
    asked, fresh = container_of(0, lr=0.01), container_of(0, lr=0.01)
    before = params_of_parts(asked)
    asked.state_dict()
    assert_same(params_of_parts(asked), before)
    ends = []
    for container in (asked, fresh):
        train_parts(container, range(100))
        (net,) = container.pairs[0][0].values()
        ends.append(sum(loss_of(net, t).item() for t in range(100)) / 100)
    start = sum(loss_of(Net(0), t).item() for t in range(100)) / 100
    assert start - ends[0] > 0.9 * (start - ends[1]) > 0


# ---------------------------------------------------------------- torch's schedulers


@every_class
def test_warm_up_then_decay_by_torchs_schedulers_equals_rates_set_by_hand(case: Any):
    scheduled, by_hand = Net(), Net()
    one, other = case(param_groups(scheduled, 0.1)), case(param_groups(by_hand, 0.1))
    warm_up, cosine = LinearLR(one, 0.25, total_iters=3), CosineAnnealingLR(one, 5)
    schedule = SequentialLR(one, [warm_up, cosine], milestones=[3])
    rates = []
    for t in range(8):
        rates.append(schedule.get_last_lr()[0])
        for group in other.param_groups:
            group["lr"] = rates[-1]
        train(scheduled, one, range(t, t + 1))
        train(by_hand, other, range(t, t + 1))
        schedule.step()
    wanted = [0.25, 0.5, 0.75, *(0.5 + 0.5 * math.cos(math.pi * t / 5) for t in range(5))]
    assert rates == pytest.approx([0.05 * share for share in wanted])
    assert_same(params_of(scheduled), params_of(by_hand))
