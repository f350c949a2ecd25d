"""The private places of upstream libraries that this package touches, and the public ones that it replaces.

No transfer's verification depends on one of them: copies are verified at torch's dispatcher (`transfer.interception`),
through its public interface. A place that upstream has moved is a `SeamError` that names what is not possible, or what
the table says happens instead. Names and parameters do not show whether upstream still calls a place: `make drift`
tries the versions of `TESTED` and a run says which of the installed ones are newer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_rocm_tune.errors import SeamError

Kind = Literal["patched", "overridden", "called", "read"]


@dataclass(frozen=True)
class Seam:
    """One private place of an upstream library, or a public one that we replace."""

    name: str  # ours
    module: str
    attribute: str  # dotted, inside the module; of objects that are made there where ``kind`` is "read"
    leading: str  # the parameters that our replacement or override relies on, in order
    why: str  # what passes there
    kind: Kind = "patched"
    feature: str = ""  # what is impossible without it: checked at its first use. "": checked when a trainer is made
    without: str = ""  # what happens where it is missing; "": an error

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.leading.split())

    @property
    def patched(self) -> bool:
        return self.kind == "patched"


TESTED = {
    "torch": ("2.10.0", "2.14.1"),
    "transformers": ("5.19.0", "5.24.0"),
    "accelerate": ("1.13.0", "1.15.0"),
    "peft": ("0.20.0", "0.21.2"),
    "trl": ("1.13.0", "1.16.0"),
    "bitsandbytes": ("0.50.0", "0.50.2"),
}
"""The oldest and the newest version of each library with which runs were tried: docs/compatibility.md."""
LEFT_OUT = {"trl": SpecifierSet("==1.15.*")}
"""Versions between them that do not work: TRL 1.15 computes its loss with Triton on every device, the CPU too."""
REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How the names of PEFT's initialisations begin (0.21.2) that subtract the adapter's start from the base's weights: it
fits no unchanged base."""

_PACKAGE = __name__.partition(".")[0]
_LOADING = "transformers.core_model_loading"
_MODELS = "transformers.modeling_utils"
_TRAINER = "transformers.trainer"
_TRL_TRAINER = "trl.trainer.sft_trainer"
_HEAD = "trl.kernels.chunked_logprob"
_ACCELERATOR = "accelerate.accelerator"
_FSDP = "accelerate.utils.fsdp_utils"
_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_NF4_EXPERTS = "experts in 4 bit (NF4)"
_PACKED_EXPERTS = "experts that stay packed in 4 bit"
_ADAPTED_EXPERTS = "adapters of packed experts"
_STREAMING = "--stream_weights"
_FSDP2 = "FSDP2"
_SHARDED = "FSDP2 and tensor parallelism"
_CHECKS = "the check of products (--check_arithmetic)"
_HEADS = "the fused output head on a card (--one_pass_loss, and losses without Triton)"
_PLAN = "the memory plan (hf-rocm-tune plan, --auto_fit)"
_VLLM = "--use_vllm"

SEAMS = (
    # ---- every run on one card ----
    Seam("storage_identity", "torch", "UntypedStorage._cdata", "", kind="read",
         why="tells whether two tensors share memory"),
    Seam("tensor_version", "torch", "Tensor._version", "", kind="read",
         why="tells what a program has written on purpose from what has changed by itself"),
    Seam("prepare_model", _ACCELERATOR, "Accelerator.prepare_model", "self model device_placement evaluation_mode",
         kind="overridden", why="would move the whole model again; called with device_placement off"),
    Seam("gather", _ACCELERATOR, "Accelerator.gather", "self tensor", kind="overridden",
         why="trainers gather metrics in a micro-step: those only logged wait until they are, and no rank waits there "
             "for one that is out of memory"),
    Seam("clipping", _ACCELERATOR, "Accelerator.clip_grad_norm_", "self parameters max_norm norm_type",
         kind="overridden", why="the norm of the gradients is judged, and samples show how they were clipped"),
    Seam("accumulated_loss", _TRAINER, "_tr_loss", "", kind="read",
         why="the loss that a step has added is taken out again when the step is repeated"),
    Seam("input_cast", "peft.tuners.lora.layer", "Linear._cast_input_dtype", "self x dtype", kind="overridden",
         why="q, k and v keep one input instead of three", without="more memory: each adapter keeps its own copy"),
    # ---- speed, of a run on one card: what happens where it is missing is slower, and as safe ----
    Seam("metrics", _TRL_TRAINER, "_metrics", "", kind="read",
         why="metrics stay on the card until they are logged, and a step that is repeated leaves none twice",
         without="each metric is read at once, and a repeated step is logged twice"),
    Seam("trained_tokens", _TRL_TRAINER, "_total_train_tokens", "", kind="read",
         why="counts the trained tokens without reading them in each micro-step",
         without="each metric is read at once, and tokens of a repeated step count twice"),
    Seam("checkpointing_off", _MODELS, "PreTrainedModel.gradient_checkpointing_disable", "self", kind="overridden",
         why="TRL turns recomputing off and on around a reference's forward: that is left out",
         without="with --recompute, a preference method recomputes all layers fully"),
    Seam("checkpointing_on", _MODELS, "PreTrainedModel.gradient_checkpointing_enable",
         "self gradient_checkpointing_kwargs", kind="overridden", why="likewise",
         without="with --recompute, a preference method recomputes all layers fully"),
    # ---- features: checked at their first use ----
    Seam("float16_scaling", "torch.amp.grad_scaler", "_per_optimizer_states", "", kind="read",
         feature="repeating a step with --fp16", why="lets gradients be unscaled again in a step that is repeated"),
    Seam("shifted_labels", _TRAINER, "_loss_shifts_labels", "", kind="read",
         feature="going on with smaller parts when memory runs out (--on_oom step_down)",
         why="whether the loss shifts labels, which weighs the parts of a micro-batch"),
    Seam("evaluation_loaders", _TRAINER, "_eval_dataloaders", "", kind="read",
         feature="evaluating again with fewer rows, with workers that persist (--dataloader_persistent_workers)",
         why="upstream keeps the loader of an evaluation there: that of the former number of rows is dropped",
         without="there is none: each evaluation makes its own"),
    Seam("card_count", "transformers.training_args", "_n_gpu", "", kind="read",
         feature="a split model (--split_model)", why="transformers would count a batch for each visible card"),
    Seam("original_module", "torch._dynamo.eval_frame", "_orig_mod", "", kind="read",
         feature="--torch_compile", why="the model inside a compiled one"),
    Seam("saved_model", _TRAINER, "Trainer._save", "self output_dir state_dict", kind="called",
         feature="a checkpoint of a sharded model, or one that is written again",
         why="writes weights that were fetched, verified, or gathered over the cards"),
    Seam("emergency_checkpoint", _TRAINER, "Trainer._save_checkpoint", "self model trial", kind="called",
         feature="the checkpoint before the end that bad data brings", why="saves what was learned so far"),
    Seam("prepared_rows", "trl.trainer.sft_trainer", "SFTTrainer._prepare_dataset",
         "self dataset processing_class args packing formatting_func dataset_name", kind="overridden",
         feature="the counts of rows", why="rows are counted between rendering and packing"),
    Seam("base_settings", "trl.trainer.base_config", "_BaseConfig", "", kind="read",
         feature="the command line", why="the type of all methods' settings; for type checkers alone"),
    Seam("commit", "transformers.configuration_utils", "_commit_hash", "", kind="read",
         feature="attesting a model from the Hub that was loaded elsewhere",
         why="names the revision of its files", without="it counts as not attested"),
    Seam("ignored_weights", _MODELS, "PreTrainedModel._keys_to_ignore_on_load_unexpected", "", kind="read",
         feature="keeping a base's further tensors in a merge",
         why="tensors of files that a class leaves out without a report"),
    Seam("weight_conversions", _LOADING, "_weight_conversions", "", kind="read", feature="gpt-oss's packed experts",
         why="transformers before 5.24 would save what it has made of blocks under the names of the blocks",
         without="nothing: newer versions do not do that"),
    Seam("initialised", _MODELS, "_is_hf_initialized", "", kind="read", feature="gpt-oss's packed experts",
         why="weights that are set here must not be initialised again"),
    Seam("set_weight", _LOADING, "set_param_for_module", "model target_name param_value",
         feature="--stream_weights with 4 bit, and a merge that does not fit in memory",
         why="each weight is set here once it is cast, fused or quantised: it leaves the card, or goes to a file"),
    Seam("reserve_memory", _MODELS, "caching_allocator_warmup", "model expanded_device_map hf_quantizer",
         feature="--stream_weights with 4 bit, and gpt-oss's packed experts",
         why="reserves memory for the whole model, of which only a part is on the card"),
    Seam("unquantised_layers", "transformers.quantizers.base", "HfQuantizer.get_modules_to_not_convert",
         "model skip_modules keep_in_fp32_modules", feature=_NF4_EXPERTS,
         why="names the layers that are not quantised: routers are added"),
    Seam("quantised_weights", "transformers.quantizers.quantizer_bnb_4bit",
         "Bnb4BitHfQuantizer.param_needs_quantization", "self model param_name", feature=_NF4_EXPERTS,
         why="chooses the weights that are quantised as they arrive: fused experts are added"),
    Seam("quantise", "transformers.integrations.bitsandbytes", "Bnb4bitQuantize.convert",
         "self input_dict full_layer_name model", feature=_NF4_EXPERTS,
         why="quantises a weight that has arrived: fused experts are added"),
    Seam("pack", "bitsandbytes.nn.modules", "Params4bit._quantize", "self device", kind="called", feature=_NF4_EXPERTS,
         why="quantises where the weight is, without moving it"),
    Seam("dequantise_mxfp4", "transformers.integrations.mxfp4", "Mxfp4Dequantize.convert",
         "self input_dict model full_layer_name missing_keys", feature="gpt-oss's packed experts",
         why="would turn gpt-oss's experts into bfloat16: they stay packed"),
    Seam("expert_gate", "transformers.integrations.moe", "_apply_gate", "", kind="read", feature=_PACKED_EXPERTS,
         why="the activation between an expert's two products"),
    Seam("expert_kind", "transformers.configuration_utils", "_experts_implementation", "", kind="read",
         feature=_PACKED_EXPERTS, why="chooses the function that computes experts"),
    Seam("expert_weights", "peft.tuners.lora.layer", "ParamWrapper.get_param", "self", feature=_ADAPTED_EXPERTS,
         why="an adapter of experts asks here for their weights: packed ones are described"),
    Seam("expert_adapters", "peft.tuners.lora.layer", "ParamWrapper._activate_lora", "self active_adapters",
         feature=_ADAPTED_EXPERTS, why="adds an adapter's product to the experts' weights: to packed ones it is not"),
    Seam("dequantise", "bitsandbytes.functional", "dequantize_4bit", "A quant_state",
         feature="the check of 4-bit products (--check_arithmetic)",
         why="dequantises a 4-bit weight for backward: it is checked there"),
    Seam("grouped_product", "torch", "_grouped_mm", "", kind="called", feature=_CHECKS,
         why="the products of fused experts are checked like others"),
    Seam("without_modes", "torch.utils._python_dispatch", "_disable_current_modes", "", kind="called", feature=_CHECKS,
         why="a check of a recomputed layer is not recomputed"),
    Seam("layer_hooks", "torch.nn.modules.module", "_forward_hooks", "", kind="read", feature=_CHECKS,
         why="the copy of a layer that the host computes has no hooks"),
    Seam("attention_product", "torch.nn.functional", "scaled_dot_product_attention", "", feature=_CHECKS,
         why="samples of attention are computed again"),
    Seam("packed_sequences", "transformers.masking_utils", "find_packed_sequence_indices", "position_ids",
         feature="packing without flash attention (--packing)",
         why="tells where packed examples begin: a model that never asks would let them see each other"),
    Seam("attention_kind", "transformers.configuration_utils", "_attn_implementation", "", kind="read",
         feature="packing without flash attention (--packing)",
         why="flash attention isolates examples by itself"),
    Seam("recomputed_layers", "transformers.modeling_layers", "_gradient_checkpointing_func", "", kind="read",
         feature="--recompute", why="chooses how each layer is recomputed"),
    Seam("native_library", "bitsandbytes.cextension", "_lib", "", kind="read",
         feature="the doctor's name of bitsandbytes' library", why="names it", without="it is called unknown"),
    Seam("progress_bars", "tqdm.std", "_instances", "", kind="read",
         feature="lines between progress bars", why="bars are cleared before a line", without="a bar may be broken"),
    Seam("recomputed_forward", "torch.nn.modules.module", "Module.forward", "", kind="overridden",
         feature="--recompute", why="chooses which layers are recomputed, where forward's own hooks must run inside"),
    Seam("assigned_weights", "torch.nn.modules.module", "Module.load_state_dict", "self state_dict strict assign",
         kind="overridden", feature="using an adapter with a base model",
         why="PEFT would move and cast what it loads: it is assigned"),
    Seam("backward_pass", "torch", "_C._current_graph_task_id", "", kind="called", feature=_STREAMING,
         why="tells whether layers are used in backward's order"),
    Seam("dispatch", _MODELS, "accelerate_dispatch", "model hf_quantizer device_map",
         feature="a split model, and --stream_weights",
         why="puts hooks on a model of several devices that copy activations between them"),
    Seam("vllm_weights", "trl.generation.vllm_generation", "VLLMGeneration._iter_named_params", "self", feature=_VLLM,
         why="merges the adapter into the frozen weights to send them to vLLM, and takes it out again with a rounding"),
    Seam("vllm_names", "trl.generation.vllm_generation", "VLLMGeneration._fix_param_name_to_vllm",
         "self name extra_prefixes", kind="called", feature=_VLLM, why="the names that vLLM gives to weights"),
    Seam("all_modules", "torch.nn.modules.module", "_modules", "", kind="read", feature="hf-rocm-tune script",
         why="tells which of a script's modules are whole models"),
    *(Seam(f"head{name}", _HEAD, name, "", kind="called", feature=_HEADS, why="TRL's tiles of the output head")
      for name in ("_BLOCK_SIZE", "_backward_kernel", "_backward_tile", "_forward_kernel", "_forward_tile")),
    Seam("head_sum", _HEAD, "_addmm_fp32", "", feature=_HEADS,
         why="its float32 sums are computed by the faster library", without="TRL's own product"),
    Seam("head_triton", _HEAD, "_use_triton", "device", kind="called", feature=_HEADS,
         why="tells whether tiles are computed with Triton"),
    Seam("head_without_triton", _HEAD, "_TRITON_AVAILABLE", "", feature=_HEADS,
         why="lets it compute with plain torch where Triton's driver does not compile"),
    Seam("losses_without_triton", "trl.trainer.utils", "is_triton_available", "", feature=_HEADS,
         why="likewise, for losses of whole logits"),
    Seam("losses_without_triton_1_14", "trl.trainer.utils", "_fused_logprob_entropy", "", kind="read", feature=_HEADS,
         why="likewise, in TRL 1.14"),
    Seam("plan_mode", "torch.utils._python_dispatch", "TorchDispatchMode", "", kind="called", feature=_PLAN,
         why="records the memory of a model on the meta device; rounds what the host computes of a layer at random"),
    *(Seam(f"plan{name}", "torch", f"ops.aten.{name}", "", kind="read", feature=_PLAN,
           why="an operator whose memory is counted")
      for name in ("_to_copy", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
                   "_scaled_dot_product_flash_attention_for_cpu")),
    Seam("operator_schema", "torch._ops", "_schema", "", kind="read", feature="the memory plan, and --recompute",
         why="the arguments of an operator"),
    Seam("operator_family", "torch._ops", "_overloadpacket", "", kind="read", feature=_PLAN,
         why="the operator of an overload"),
    Seam("plan_autocast", "torch", "autocast", "", feature=_PLAN, why="casts are recorded on the meta device"),
    Seam("plan_model", _MODELS, "PreTrainedModel._from_config", "", kind="called", feature=_PLAN,
         why="makes a model of a configuration", without="the class's from_config"),
    Seam("shared_accelerator_state", "accelerate.state", "PartialState._shared_state", "", kind="read",
         feature="sharding on CPUs", why="ranks of CPUs are declared as ranks of accelerators"),
    Seam("fsdp2_prepare", _FSDP, "fsdp2_prepare_model", "accelerator model", kind="called", feature=_FSDP2,
         why="decides which modules FSDP2 gathers together, and shards them"),
    Seam("fsdp2_load", _FSDP, "fsdp2_load_full_state_dict", "accelerator model full_sd cpu_offload", feature=_FSDP2,
         why="broadcasts every weight from rank 0: each rank brings its own rows through the mover instead"),
    Seam("fsdp2_gather", _COLLECTIVES, "foreach_all_gather", "fsdp_params group async_op", kind="overridden",
         feature=_FSDP2, why="weights come from the other cards here, in each forward and backward"),
    Seam("fsdp2_gather_class", _COLLECTIVES, "DefaultAllGather", "", kind="overridden", feature=_FSDP2,
         why="what is gathered is compared with what was sent"),
    Seam("fsdp2_reduce", _COLLECTIVES, "foreach_reduce", "fsdp_params unsharded_grads reduce_scatter_group",
         kind="overridden", feature=_FSDP2, why="gradients of all cards are averaged here, each card's part of them"),
    Seam("fsdp2_reduce_class", _COLLECTIVES, "DefaultReduceScatter", "", kind="overridden", feature=_FSDP2,
         why="averages are compared with projections of what was sent"),
    Seam("norms", "torch", "_foreach_norm", "", kind="called", feature=_FSDP2, why="norms of many gradients"),
    Seam("scaling", "torch", "_foreach_mul_", "", kind="called", feature=_FSDP2, why="clips many gradients"),
    Seam("full_state", _ACCELERATOR, "Accelerator.get_state_dict", "self model unwrap", kind="overridden",
         feature=_FSDP2, why="gathers a sharded model over the cards to save it, frozen weights too"),
    Seam("own_part", "torch.distributed.tensor._api", "_local_tensor", "", kind="read", feature=_SHARDED,
         why="this rank's part of a sharded tensor"),
)  # fmt: skip
"""Methods that classes of ours override are not listed here: `check_overrides` finds them by ``@override``."""

_BY_NAME = {seam.name: seam for seam in SEAMS}
_LOCK = threading.RLock()


def resolve(name: str) -> tuple[Any, str, Callable[..., Any]]:
    """Find a seam in the installed libraries: its owner, its last name, its value.

    Raises:
        SeamError: it is missing or has other parameters.
    """
    row = _BY_NAME[name]
    try:
        owner: Any = importlib.import_module(row.module)
        *path, last = row.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        value = getattr(owner, last)
    except (ImportError, AttributeError) as error:
        raise _moved_seam(row, f"it is missing ({error})") from error
    if row.parameters:
        names = tuple(inspect.signature(value).parameters)
        if names[: len(row.parameters)] != row.parameters:
            raise _moved_seam(row, f"its parameters are {names}, expected {row.parameters} first")
    return owner, last, value


def read(name: str, holder: object) -> Any:
    """The value of a private attribute of an object. Where it is missing: None if the table says what happens then.

    Raises:
        SeamError: it is missing, and there is no other way.
    """
    row = _BY_NAME[name]
    try:
        return getattr(holder, row.attribute.rpartition(".")[2])
    except AttributeError as error:
        if row.without:
            return None
        raise _moved_seam(row, f"{type(holder).__name__} lacks it") from error


def has(name: str) -> bool:
    """Whether a seam is there, as far as can be told without an object that has it."""
    try:
        check(_BY_NAME[name])
    except SeamError:
        return False
    return True


def assign(name: str, holder: object, value: object) -> None:
    """Set a private attribute of an object that `read` has found there."""
    setattr(holder, _BY_NAME[name].attribute.rpartition(".")[2], value)


def check_all() -> None:
    """Resolve every seam that a run on one card needs."""
    for row in SEAMS:
        if not row.feature and not row.without:
            check(row)


def check(row: Seam) -> None:
    """Resolve one seam; an attribute of objects is looked for in the source of the module that makes them."""
    if row.kind != "read":
        resolve(row.name)
        return
    try:
        resolve(row.name)
    except SeamError:
        name = row.attribute.rpartition(".")[2]
        if name not in _names_in(row.module):
            raise


@cache
def _names_in(module: str) -> frozenset[str]:
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError, TypeError):  # there is none
        return frozenset()
    return frozenset(re.findall(r"\b_\w+", source))


def check_overrides(trainer: type) -> None:
    """Compares the methods that our classes override with those that they override."""
    for ours, name, theirs in overrides(trainer):
        where = f"what {ours.__name__}.{name} overrides"
        if not theirs:
            raise _moved(where, "the method that it overrides is missing")
        overridden = theirs[-1]
        parameters = _parameters(vars(overridden)[name])
        expected = _parameters(vars(ours)[name])
        if parameters[: len(expected)] != expected:
            raise _moved(where, f"{overridden.__name__} has the parameters {parameters}, expected {expected} first")


def overrides(trainer: type) -> Iterator[tuple[type, str, list[type]]]:
    """(class of ours, method marked with ``@override``, classes behind it that define it), of a trainer's bases."""
    bases = [(base, base.__module__.partition(".")[0] == _PACKAGE) for base in trainer.__mro__]
    for place, (base, is_ours) in enumerate(bases):
        for name, method in vars(base).items() if is_ours else ():
            if getattr(method, "__override__", False):
                yield base, name, [other for other, own in bases[place:] if not own and name in vars(other)]


def untested() -> list[str]:
    """Installed libraries newer than those the seams were checked with, such as "peft 0.22.0"."""
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in TESTED}
    return [f"{name} {version}" for name, version in versions.items() if Version(version) > Version(TESTED[name][1])]


def is_tested(library: str) -> bool:
    """Whether the installed version lies between the oldest and the newest that were tried."""
    oldest, newest = map(Version, TESTED[library])
    version = Version(importlib.metadata.version(library).partition("+")[0])
    return oldest <= version <= newest and version not in LEFT_OUT.get(library, ())


def failed_import(error: BaseException) -> SeamError | None:
    """What to say where an upstream library is absent, or lacks a name that we or another of them import.

    None for every other error, such as a failed import of ours.
    """
    chain = [error]
    while chain[-1].__cause__ is not None:  # lazy modules of TRL and transformers raise another error from it
        chain.append(chain[-1].__cause__)
    failed = next((link for link in chain if isinstance(link, ImportError)), None)
    if failed is None:
        return None
    library = (failed.name or "").partition(".")[0]
    importer, purpose = "", ""
    for frame, _ in traceback.walk_tb(failed.__traceback__):
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("importlib"):
            importer, purpose = name, (frame.f_globals.get("__doc__") or name).splitlines()[0]
    user = importer.partition(".")[0]
    if library not in TESTED or user == library or user not in (_PACKAGE, *TESTED):
        return None
    try:
        versions = {name: importlib.metadata.version(name) for name in (library, *TESTED)}
    except importlib.metadata.PackageNotFoundError as missing:
        return SeamError(f"{missing.name} is not installed: pip install {missing.name}")
    where = f'"{re.split("[:.]", purpose)[0]}" ({importer})' if user == _PACKAGE else f"{user} {versions[user]}"
    oldest, newest = TESTED[library]
    return SeamError(
        f"{library} {versions[library]} does not have what {where} imports from it: {failed}. Install {library} "
        f"{oldest} to {newest}, or report this"
    )


def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return tuple(name for name, parameter in inspect.signature(method).parameters.items() if parameter.kind in kinds)


def _moved_seam(row: Seam, what: str) -> SeamError:
    return _moved(f"{row.module}.{row.attribute} ({row.why})", what, row.feature)


def _moved(where: str, what: str, feature: str = "") -> SeamError:
    known = ", ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())
    lost = f"{feature} is not possible" if feature else "cannot train"
    return SeamError(f"{lost}: upstream changed {where}: {what}. Checked with {known}: install these")


@cache
def source_of(module: str) -> str:
    """The source of a module, found without importing its package; empty where it cannot be read."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(spec.submodule_search_locations[0], *rest).with_suffix(".py")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@contextmanager
def replaced(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a seam for the length of the block, process-wide."""
    assert _BY_NAME[name].patched, name
    with _LOCK:
        owner, last, _ = resolve(name)
        original = inspect.getattr_static(owner, last)
        setattr(owner, last, make(original))
    try:
        yield
    finally:
        with _LOCK:
            setattr(owner, last, original)


def replace_for_good(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a seam once for the life of the process; a second call with the same name does nothing.

    For replacements that call through unless an object of ours is concerned.
    """
    assert _BY_NAME[name].patched, name
    with _LOCK:
        owner, last, value = resolve(name)
        if getattr(value, "_hf_rocm_tune_seam", None) == name:
            return
        replacement = make(value)
        replacement.__wrapped__ = value  # type: ignore[attr-defined]  # keeps inspect.signature truthful
        replacement._hf_rocm_tune_seam = name  # type: ignore[attr-defined]
        setattr(owner, last, replacement)
