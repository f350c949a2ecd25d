"""The training verbs, and the classes of TRL and ours whose fields are their flags."""

from __future__ import annotations

from dataclasses import dataclass

from hf_rocm_tune.data.formats import Method

LORA_FACTOR = 10
"""An adapter's learning rate over that of full training, in TRL's examples."""


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A training verb: its help, and the classes whose fields are its flags."""

    config: str  # TRL's class of training settings
    what: str  # one sentence
    rate: float  # TRL's learning rate
    script: tuple[str, str] = ("trl.scripts.utils", "ScriptArguments")  # TRL's class of the other settings
    library: str = ""  # module of config and trainer, if not ``trl``
    makes_rows: bool = False  # while it trains, so that they cannot be shown before
    keeps_columns: bool = False  # its collator reads columns that the model does not

    @property
    def owners(self) -> tuple[tuple[str, str], ...]:
        """Module and name of the classes that the parser is built from, in its order."""
        config = f"{self.library or 'trl.trainer'}.{self.config.removesuffix('Config').lower()}_config"
        ours = tuple(("hf_rocm_tune.settings.arguments", name) for name in ("TuneArguments", "RanksArguments"))
        common = (("trl.trainer.model_config", "ModelConfig"), ("trl.scripts.utils", "DatasetMixtureConfig"))
        return (*ours, self.script, (config, self.config), *common)

    @property
    def trainer(self) -> str:
        return self.config.replace("Config", "Trainer")


_SFT = "Fine-tune a language model; every byte sent to the device is verified."
_REWARD = "Train a reward model on chosen and rejected answers, verified."
_ORPO = "Train on pairs without a reference model (experimental in TRL), verified."
_GRPO = "Train on rewards for the model's own answers, verified."
_GRPO_SCRIPT = ("trl.scripts.grpo", "GRPOScriptArguments")
_ORPO_LIBRARY = "trl.experimental.orpo"
VERBS: dict[Method, Verb] = {
    "sft": Verb(config="SFTConfig", rate=2e-5, what=_SFT),
    "dpo": Verb(config="DPOConfig", rate=1e-6, what="Train on pairs of a chosen and a rejected answer, verified."),
    "kto": Verb(config="KTOConfig", rate=1e-6, what="Train on answers labelled good or bad, verified."),
    "reward": Verb(config="RewardConfig", rate=1e-4, what=_REWARD),
    "grpo": Verb(config="GRPOConfig", rate=1e-6, what=_GRPO, script=_GRPO_SCRIPT, makes_rows=True),
    "orpo": Verb(
        config="ORPOConfig", rate=1e-6, what=_ORPO, library=_ORPO_LIBRARY, makes_rows=True, keeps_columns=True
    ),
}
