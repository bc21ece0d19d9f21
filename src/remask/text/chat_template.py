"""Chat templates: programs of a checkpoint's authors, which run in processes of their own, with limits."""

import marshal
from collections.abc import Mapping, Sequence
from typing import Any

from remask.checks.values import shown
from remask.errors import ConfigError
from remask.machine.helper import HelperError, Helpers, RefusedError

MAX_SECONDS = 1.0  # of processor time for one rendering; ordinary conversations take well under a hundredth of it
MAX_BYTES = 512 << 20  # of memory of a process that renders, of which Python itself takes 24 MiB
MAX_CHARACTERS = 8 << 20  # of a conversation: twice the longest request body that a server takes by default


class ChatTemplate:
    """A Jinja template and the processes that render it, one for each thread that renders at the same time.

    Processes are started, reused and ended as `Helpers` says. `variables` are what the template reads besides the
    conversation, such as the special tokens.
    """

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        job = marshal.dumps({"template": text, "variables": dict(variables), "max_length": MAX_CHARACTERS})
        task = "remask.text.template_worker:renderer"
        self._helpers = Helpers(task, job, seconds=MAX_SECONDS, memory=MAX_BYTES)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. Safe on any thread; waits for the process without the interpreter's lock.

        `variables` are further ones that the template reads, such as `enable_thinking` and `tools`. Raises
        `ConfigError` if the template refuses the conversation, fails on it or exceeds a limit; and if `variables` have
        a reserved name, or values other than texts, numbers, booleans, lists and objects.
        """
        if variables is not None and not isinstance(variables, Mapping):
            raise ConfigError(f"chat_template_kwargs must be an object of variables by name, got {shown(variables)}")
        # A key without a value is left out: templates ask whether a key is there.
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values = {"messages": chat, "add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        reserved = sorted((set(values) - {"tools"}) & set(variables or {}))
        if reserved:
            raise ConfigError(f"chat_template_kwargs: {reserved[0]} cannot be set; leave it out")
        values |= variables or {}
        try:
            content = marshal.dumps(values)
        except ValueError as error:
            raise ConfigError(
                f"messages and chat_template_kwargs must hold texts, numbers, lists and objects only: {error}"
            ) from error
        try:
            return self._helpers.ask(content).decode("utf-8", "surrogatepass")
        except (RefusedError, HelperError) as error:
            verb = "refuses" if isinstance(error, RefusedError) else "fails on"
            raise ConfigError(f"The model's chat template {verb} these messages: {error}") from error
