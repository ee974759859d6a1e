"""A conversation at the terminal: its messages, its figures, and the commands that begin with a slash."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import figures
from paceline.cli.terminal import counted
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.engine import RequestMetrics
    from paceline.llm import LLM

COMMAND = re.compile(r"/([a-zA-Z?]*)(?:\s+(.*))?", re.DOTALL)
HELP = {
    "/help": "these lines",
    "/system TEXT": "replace the system message; without TEXT show it",
    "/reset": "forget the conversation, all but the system message",
    "/save FILE": "write the conversation as a line of JSON, which `paceline bench` and `tune` read as prompts",
    "/stats": "speed, drafts and memory: of the last answer, and of all",
    "/exit": "end, as Ctrl-D does",
}


MEANT = {"?": "help", "quit": "exit", "bye": "exit", "clear": "reset"}
"""Names that other chats have for these commands."""


class Ended(Exception):  # noqa: N818 - not an error
    """The user has had enough."""


@dataclass(slots=True)
class TerminalConversation:
    """What was said so far.

    Attributes:
        system: the message that says how to answer; "" for none.
        turns: user's and model's messages in order, the user's first.
        answers: metrics of each answer, forgotten messages' included.
        load: the line on loading the model.
        context: most tokens that the model can hold.
    """

    system: str
    load: str
    context: int
    turns: list[dict[str, str]] = field(default_factory=list)
    answers: list[RequestMetrics] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, the system's first."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str, metrics: RequestMetrics | None) -> None:
        """Keep an answer; where nothing was said, the question goes too, so that roles alternate."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()
        if metrics is not None:
            self.answers.append(metrics)

    def fits_alone(self, llm: LLM) -> bool:
        """Whether the last message could be answered without those before it.

        Raises:
            PromptError: it is no text that the tokenizer takes.
        """
        system = self.messages[: bool(self.system)]
        return len(llm.chat_ids([*system, self.turns[-1]])) < self.context

    def start_over(self) -> None:
        """Forget all but the last message, which awaits its answer."""
        del self.turns[:-1]

    # -------------------------------------------------------------------------------------------- commands

    def command(self, line: str) -> list[str] | None:
        """Do what a line asks for; returns what to tell the user, None for a line that is a message.

        Raises:
            Ended: by /exit.
            ConfigError: no such command, or one that lacks something.
        """
        found = COMMAND.fullmatch(line.strip())
        if found is None:
            return None
        typed, words = found[1].lower(), (found[2] or "").strip()
        name = MEANT.get(typed, typed)
        takes_words = {"system": self._set_system, "save": self._save}
        alone = {"help": self._help, "reset": self._reset, "stats": self._stats, "exit": self._exit}
        if name in takes_words:
            return takes_words[name](words)
        if name in alone and not words:
            return alone[name]()
        if name in alone:
            raise ConfigError(f"/{name} stands alone, got {words[:60]!r} behind it")
        raise ConfigError(f"there is no command /{name}; /help lists them")

    def _help(self) -> list[str]:
        widest = max(map(len, HELP))
        lines = [f"{name:<{widest}}  {what}" for name, what in HELP.items()]
        return [*lines, "Ctrl-C stops an answer and keeps what was said; a pasted text may have several lines."]

    def _set_system(self, words: str) -> list[str]:
        if words:
            self.system = words
            return ["the system message is replaced"]
        return [self.system or "there is no system message"]

    def _reset(self) -> list[str]:
        self.turns.clear()
        return ["the conversation is forgotten"]

    def _save(self, words: str) -> list[str]:
        if not words:
            raise ConfigError("/save needs a file, as in /save conversation.jsonl")
        path = Path(words).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except FileExistsError as error:
            raise ConfigError(f"{words} is there already; give another file") from error
        except OSError as error:
            raise ConfigError(f"{words} cannot be written ({error.strerror}); give another file") from error
        return [f"{counted(len(self.messages), 'message')} in {path}"]

    def _stats(self) -> list[str]:
        if not self.answers:
            return [self.load, figures.memory()]
        last, number = self.answers[-1], len(self.answers)
        tokens = sum(metrics.num_generation_tokens for metrics in self.answers)
        seconds = sum(metrics.generation_time for metrics in self.answers)
        used = last.num_prompt_tokens + last.num_generation_tokens
        return [
            self.load,
            *figures.decoding_figures(last),
            f"drafts       {figures.drafts([last])}",
            f"context      {used:,} of {self.context:,} tokens",
            f"all answers  {number}: {counted(tokens, 'token')}, {tokens / max(seconds, 1e-9):.1f} tokens/s, drafts: "
            f"{figures.drafts(self.answers)}",
            figures.memory(),
        ]

    def _exit(self) -> list[str]:
        raise Ended
