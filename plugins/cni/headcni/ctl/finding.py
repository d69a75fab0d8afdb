"""What is wrong, what it means for pods, and the command that puts it right."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple

from .terminal import BAD, DOUBTFUL, STRONG, paint, wrapped

NODE, CONTROLLER, HEADSCALE = "node", "controller", "headscale"
PLACES = {
    NODE: "",
    CONTROLLER: "on the controller, with your inventory in place of INVENTORY: ",
    HEADSCALE: "on the Headscale server: ",
}
SITE = "ansible-playbook -i INVENTORY site.yml"


class Finding(NamedTuple):
    """`id` never changes. `run` is one shell command for the machine that `where` names, or empty
    if no command is right for everybody. A finding that is not `sure` may go away by itself."""

    id: str
    found: str
    means: str = ""
    run: str = ""
    where: str = NODE
    sure: bool = True

    def as_dict(self) -> Dict[str, Any]:
        return self._asdict()

    def in_words(self, part: str) -> str:
        colour = BAD if self.sure else DOUBTFUL
        found = wrapped(self.found, f"{paint(part, colour)}: ", "  ")
        return "\n".join([found, *self.advice()])

    def advice(self, indent: str = "  ") -> list[str]:
        """What it means, and the command on a line of its own, so that it can be copied."""
        lines = [wrapped(self.means, f"{indent}means: ", f"{indent}       ")] if self.means else []
        if not self.run:
            return lines
        place = PLACES[self.where]
        if place:
            return [*lines, f"{indent}run {place}", f"{indent}       {paint(self.run, STRONG)}"]
        return [*lines, f"{indent}run:   {paint(self.run, STRONG)}"]
