"""The help of a training verb: one screen."""

from __future__ import annotations

from hf_rocm_tune.data.formats import Method
from hf_rocm_tune.lifecycle.launcher_flags import CONFIG_FLAG, bare
from hf_rocm_tune.settings.flags import ALIASES, HELP_ALL, flags
from hf_rocm_tune.settings.verbs import LORA_FACTOR, VERBS

_SCREEN = """\
model and data:
  --model NAME                    Hub id or directory
  --dataset NAME                  Hub id, directory or file
  --config RECIPE                 a YAML file, or the name of a built-in recipe
  --output_dir DIR                result and report
  --max_seq_length N              tokens per row; longer rows are cut [1024]
  --packing                       pack several short examples into one sequence
  --assistant_only_loss BOOL|auto train on the assistant's answers only
  --mask_thinking                 leave <think> ... </think> out of the loss
  --eval_split_size X|auto        rows split off from the data to evaluate

method:
  --use_peft BOOL                 LoRA; false trains all weights [true]
  --load_in_4bit                  QLoRA: LoRA on a base in 4 bits
  --lora_r N                      rank of the adapters [16]
  --lora_alpha N                  adapter scale is alpha over rank [32]
  --lora_dropout X                dropout before the adapters [0]
  --lora_target_modules NAME ...  layers with adapters [all-linear]
  --adapter_name_or_path DIR|ID   continue training an adapter
OWN
steps:
  --epochs X                      passes over the data [3]
  --max_steps N                   stop after N steps; -1: no limit [-1]
  --lr X                          learning rate [RATE]
  --batch_size N                  rows in one pass on a card [8]
  --gradient_accumulation_steps N passes per step [1]
  --warmup_steps N                steps to reach the full rate
  --eval_strategy no|steps|epoch  when to evaluate [no]
  --early_stopping_patience N     stop after N evaluations without improvement
  --save_steps N                  steps between two checkpoints [500]
  --logging_steps N               steps between two log rows [10]
  --seed N                        seed of all random numbers [42]

memory:
  --auto_fit off|plan             choose batch and checkpointing [off]
  --gradient_checkpointing BOOL   recompute activations [true]
  --stream_weights auto|off|N     layers in host memory, fetched in use [off]
  --split_layers auto|N,N         put one model on several cards
  --tensor_parallel               compute each layer on two cards
  --on_oom step_down|stop         smaller passes, or exit code 5 [step_down]

verification and result:
  --verify full|sample|off        which transfers are verified [full]
  --on_corruption recover|stop    send again, or exit code 3 [recover]
  --overwrite_output_dir          replace another run in --output_dir
  --push_to_hub                   upload the result and verify it
  --report_to NAME                tensorboard, trackio, wandb ... [none]

more:
  --accelerate_config NAME        name or path of an Accelerate config
  --dry_run                       show the rows and what counts, and exit
  --print_config                  print all settings as a recipe and exit
  -v, --quiet                     print more at the start, or warnings only
  --help_all                      every flag: ours, TRL's and the launcher's"""
_BETA = "  --beta X                        weight of the distance to the reference [{}]\n"
_ANSWER = "  --max_completion_length N       tokens per answer; longer ones are cut"
_OF_METHOD: dict[Method, str] = {
    "dpo": f"{_BETA.format(0.1)}  --loss_type NAME                sigmoid, ipo, hinge, apo_zero ...\n",
    "kto": f"""{_BETA.format(0.1)}\
  --desirable_weight X            weight of the good answers [1]
  --undesirable_weight X          weight of the bad answers [1]
""",
    "orpo": f"  --beta X                        weight of the odds ratio [0.1]\n{_ANSWER}\n",
    "reward": "  --center_rewards_coefficient X  keeps the rewards around zero\n",
    "grpo": f"""\
  --reward_funcs NAME ...         of TRL, or module.function
  --reward_model_name_or_path ID  a reward model, verified too
  --num_generations N             answers for each prompt [8]
  --steps_per_generation N        micro-batches from one generation
{_ANSWER} [512]
{_BETA.format(0)}""",
}
#: Flags of the screen that the other methods refuse, and those whose default GRPO computes.
_SFT_ONLY = frozenset({"auto_fit", "split_layers"})
_COMPUTED = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})
_NO_FIELDS = frozenset({bare(CONFIG_FLAG), bare(HELP_ALL), ""})


def screen(verb: Method) -> str:
    """The common flags of a verb with their defaults, on one screen."""
    known = flags(verb)
    row = VERBS[verb]
    hidden: set[str] = set()
    if verb != "sft":
        hidden |= _SFT_ONLY
    if verb == "grpo":
        hidden |= _COMPUTED
    if row.makes_rows:
        hidden.add("dry_run")
    own = ""
    if verb in _OF_METHOD:
        own = f"\n{verb}:\n{_OF_METHOD[verb]}"
    text = _SCREEN.replace("OWN\n", f"{own}\n").replace(
        "[RATE]", f"[{LORA_FACTOR * row.rate:g}; {row.rate:g} without LoRA]"
    )
    lines = [f"usage: hf-rocm-tune {verb} --model NAME --dataset NAME [flags]", "", row.what, ""]
    for line in text.splitlines():
        typed = bare(line.split()[0]) if line.startswith("  --") else ""
        name = ALIASES.get(typed, typed)
        if name not in hidden and (not known or name in known | _NO_FIELDS):
            lines.append(line)
    return "\n".join(lines)
