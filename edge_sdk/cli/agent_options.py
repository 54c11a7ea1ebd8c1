"""Options that commands of `splitedge agent` share, and their place before `agent.toml`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_sdk.cli.times import length_in

if TYPE_CHECKING:
    from edge_sdk.settings import AgentSettings

State = Annotated[Path, typer.Option("--state", help="Folder with all files of this device.")]
STATE_DEFAULT = Path("splitedge-agent")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

FILE = "default: as agent.toml says"
Deadline = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        parser=length_in("s"),
        help=f"Time to wait for the server, such as 0.5 or 2s; {FILE}, else 1.",
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        help=f"Answer on the device if the uncertainty is below this; {FILE}, else the bundle's."
    ),
]
Backbone = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The only network to train: a name such as cnn6, or package.module:function of this "
        "machine, with the module in the current folder; default: any that splitedge has.",
    ),
]
Gate = Annotated[
    str | None,
    typer.Option(
        metavar="GATE",
        help="Uncertainty that answers are judged by: entropy, margin, vacuity-exp or vacuity, "
        "with --threshold or --budget; or several, each with its own threshold: "
        f"'all(entropy:0.3, margin:0.2)', 'any(...)'; {FILE}, else the bundle's.",
    ),
]
Limit = Annotated[
    float | None,
    typer.Option(
        "--budget",
        metavar="SHARE",
        help="Set the threshold so that at most this share of the predictions asks the server.",
    ),
]
Delta = Annotated[
    float | None,
    typer.Option(
        "--agreement",
        metavar="DELTA",
        help="Set the threshold so that the server would give another label for at most this share "
        "of the device's answers.",
    ),
]
Codec = Annotated[
    str | None,
    typer.Option(
        help="Codec of data sent to the server: fp32, fp16, int8, int8-channel, int4-channel, or "
        "compressed: int8-zstd, int6-zstd, int4-zstd, int4-channel-zstd; "
        f"{FILE}, else the bundle's."
    ),
]
RawInputs = Annotated[
    bool | None,
    typer.Option(
        "--raw-inputs/--no-raw-inputs",
        help="Send the server the input itself, compressed without loss, where that takes fewer "
        f"bytes than the features; {FILE}, else no.",
    ),
]
Threads = Annotated[
    int | None, typer.Option(help=f"Compute threads of one prediction; {FILE}, else 1.")
]
LateAnswers = Annotated[
    bool | None,
    typer.Option(
        "--late-answers/--no-late-answers",
        help=f"Keep queries without an answer, and ask the server again later; {FILE}, else no.",
    ),
]
LearnFrom = Annotated[
    str | None,
    typer.Option(
        "--learn",
        metavar="LABELS",
        help="Improve the exit head on this device, from 'corrections' of its answers, from the "
        f"answers of the 'server', or from 'both'; {FILE}, else from none.",
    ),
]
Local = Annotated[bool, typer.Option("--local", help="Never ask the server.")]
Personal = Annotated[
    str | None,
    typer.Option(
        metavar="TRAINING",
        help="Use this device's personal weights from that training (exit head, auxiliary model or "
        "last layer) in place of the bundle's. The bundle must be exported from the same run.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options of one command that replace settings of `agent.toml`; None leaves the setting.

    Attributes:
        limit: of `Budget`. delta: of `Agreement`. learn: labels of `Learn`.
        traces, traces_share: of `Traces`.
        local: True never asks the server.
    """

    deadline_s: float | None = None
    gate: str | None = None
    threshold: float | None = None
    limit: float | None = None
    delta: float | None = None
    codec: str | None = None
    raw_inputs: bool | None = None
    threads: int | None = None
    late_answers: bool | None = None
    personal: str | None = None
    learn: str | None = None
    traces: str | None = None
    traces_share: float | None = None
    local: bool = False

    def settings(self, file: AgentSettings) -> AgentSettings:
        """The settings of the file with the options in their place.

        Raises: ConfigurationError for values that cannot be, or options that exclude each other.
        """
        from dataclasses import replace

        from edge_sdk.errors import ConfigurationError
        from edge_sdk.settings import Agreement, Budget, Learn
        from edge_sdk.tracing.options import chosen_traces

        words = {"--threshold": self.threshold, "--budget": self.limit, "--agreement": self.delta}
        asked = [word for word, value in words.items() if value is not None]
        if len(asked) > 1:
            raise ConfigurationError(f"expected one of {', '.join(asked)}, got {len(asked)}")
        changed: dict[str, Any] = {
            name: value
            for name in (
                "deadline_s",
                "codec",
                "raw_inputs",
                "threads",
                "late_answers",
                "personal",
            )
            if (value := getattr(self, name)) is not None
        }
        if self.local:
            changed = {"offload": False, "late_answers": False, "controller": None, **changed}
            # what the file sets up with a server has no use here, and is no fault
            if file.controller is not None:  # its gate may have no threshold of its own
                changed["gate"] = None
            if file.learn is not None and file.learn.labels == "server":
                changed["learn"] = None
        if self.gate is not None:  # the file's threshold is in another gate's unit
            changed |= {"gate": self.gate, "threshold": None}
        if self.learn is not None:
            labels: Any = self.learn
            changed["learn"] = replace(file.learn or Learn(), labels=labels)
        changed["traces"] = chosen_traces(self.traces, self.traces_share, file.traces)
        old = file.controller
        if self.threshold is not None:
            changed |= {"threshold": self.threshold, "controller": None}
        elif self.limit is not None:
            kept = old if isinstance(old, Budget) else Budget(self.limit)
            budget = replace(kept, limit=self.limit)
            changed |= {"threshold": None, "controller": budget}
        elif self.delta is not None:
            known = old if isinstance(old, Agreement) else Agreement(self.delta)
            agreement = replace(known, delta=self.delta)
            changed |= {"threshold": None, "controller": agreement}
        return replace(file, **changed)

    def given(self) -> list[str]:
        """The options that were given, as the user writes them."""
        words = {"deadline_s": "deadline", "limit": "budget", "delta": "agreement"}
        set_ = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return [f"--{words.get(name, name).replace('_', '-')}" for name in set_]
