"""The names of columns, roles and marks that TRL and other toolkits give to the parts of a row."""

from __future__ import annotations

from typing import Literal

STREAMED_ROWS = 100
"""Rows of a stream that are read before a model is loaded."""
MASKED = -100
"""The label of a token that does not count in the loss."""

Kind = Literal["messages", "prompt_completion", "text", "tokenized", "preference", "unpaired", "prompt"]
Method = Literal["sft", "dpo", "kto", "reward", "grpo", "orpo"]

# ---- columns: TRL's names first, then those of other toolkits -------------------------------------------------------

PROMPTS = ("prompt", "instruction", "question", "query")
ANSWERS = ("completion", "output", "answer", "response")
CHATS = ("messages", "conversations")
MORE = ("input", "context")
"""Added to an instruction."""
SYSTEMS = ("system", "system_prompt")
HISTORY = "history"
"""LLaMA-Factory's and ms-swift's: earlier questions and answers, in pairs."""
TURNS = (*SYSTEMS, HISTORY)
BESIDE_IDS = ("labels", "completion_mask", "assistant_masks", "attention_mask")
"""Beside ``input_ids``."""
FUNCTIONS = "functions"
"""OpenAI's former name of ``tools``."""
TEMPLATE_KWARGS = "chat_template_kwargs"
OF_TEMPLATE = ("tools", FUNCTIONS, TEMPLATE_KWARGS)
"""What a chat template reads beside the messages."""
KTO_TAG = "kto_tag"
"""LLaMA-Factory's name of KTO's ``label``."""
REJECTED = ("rejected_response", "rejected_messages")
"""ms-swift's: beside a conversation with the chosen answer."""
OF_OPENAI = ("preferred_output", "non_preferred_output")
"""OpenAI's: the answers of a preference pair."""
MARGIN = "margin"
"""Of a pair, which TRL's reward trainer reads."""
READ_BY_TRL = frozenset({"prompt", "completion", "messages", "conversations", "text", "chosen", "rejected"})
TRAINING = frozenset(
    {*READ_BY_TRL, *PROMPTS, *ANSWERS, *MORE, *TURNS, "tools", FUNCTIONS, "documents", "chat_history", "label"}
    | {"reasoning", "reasoning_content", "thinking", *REJECTED, KTO_TAG, TEMPLATE_KWARGS, *BESIDE_IDS}
)
"""Columns that would be training data in another format, here or in another toolkit."""

# ---- inside a message -----------------------------------------------------------------------------------------------

MESSAGE_KEYS = ("role", "content")
ASKED = ("user", "assistant")
"""The roles of a pair of `HISTORY`."""
MARKS = ("weight", "train", "training", "loss")
"""Whether a message is in the loss, by OpenAI, Axolotl (both spellings) and ms-swift."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of parts of a content that are text; the latter two in OpenAI's later form."""
CALL_ROLES = ("function_call", "tool_call")
"""ShareGPT's and ms-swift's: a message whose text is a call."""
STANDARD_ROLES = frozenset({"user", "assistant", "system", "tool", "developer"})
ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai", *CALL_ROLES), "assistant"),
    **dict.fromkeys(("observation", "function", "tool_response"), "tool"),
}
"""Other names of roles, in lower case."""

# ---- in files of CSV ------------------------------------------------------------------------------------------------

MISSING = frozenset({"NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "NULL", "null", "None"})
"""Words that pandas and other readers of CSV take for a missing value."""
