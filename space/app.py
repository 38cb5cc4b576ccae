"""A page that answers one question: will this training step fit?

    pip install -r space/requirements.txt gradio
    python space/app.py                # then open http://127.0.0.1:7860

Each question is the command line's: ``sacplan fit --json`` in a process of its own (``docs/ci.md`` lists its fields),
then ``sacplan plan`` and ``sacplan profile`` for the picture. A question that takes too long or too much memory ends
that process, and the page says so. Nothing is computed and no weights are made, so the smallest machine of Hugging Face
Spaces will do.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
import matplotlib

matplotlib.use("agg")  # figures are drawn to images, on a machine without a screen

import sacplan

SECONDS = 240
"""Limit on one command. Llama-3-70B takes about a minute on two cores."""

MODELS = (
    "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B", "mistralai/Mistral-7B-v0.1", "google/gemma-3-4b-pt", "microsoft/phi-4",
    "openai/gpt-oss-20b", "openai-community/gpt2", "google-bert/bert-base-uncased", "google-t5/t5-base",
    "google/vit-base-patch16-224",
)  # fmt: skip
"""Suggestions. Any other name that sacplan knows can be typed, and any other model is a ``config.json``."""

OPTIMIZERS = (
    "adamw", "adamw-fused", "adamw-8bit", "paged-adamw-8bit", "adafactor", "muon", "lion", "sgd", "none",
)  # fmt: skip
"""The common ones. Any other that sacplan knows can be typed."""

DTYPES = ("bfloat16", "float16", "float32")
DEVICES = ("rtx-4090", "rtx-3090", "l4", "l40s", "a100-40gb", "a100-80gb", "h100", "h200", "b200")

STYLE = """
.gradio-container { max-width: 1280px !important; margin: auto; }
.verdict { border-left: .4rem solid; padding: .6rem 1rem; font-size: 1.1rem; overflow-wrap: anywhere; }
.verdict b { display: block; font-size: 1.4rem; }
.fits { border-color: #1a7f37; } .fits b { color: #1a7f37; }
.partly { border-color: #b26b00; } .partly b { color: #b26b00; }
.not { border-color: #c0392b; } .not b { color: #c0392b; }
.rows { overflow-x: auto; max-width: calc(100vw - 5.5rem); }
.rows table { border-collapse: collapse; white-space: nowrap; width: 100%; margin: 0 !important; border: 0 !important; }
.rows tr, .rows th, .rows td { border: 0 !important; }
.rows { font-size: .9rem; }
.rows th, .rows td { padding: .25rem .4rem; text-align: left; border-bottom: 1px solid #8884 !important; }
.rows td.number, .rows th.number { text-align: right; font-variant-numeric: tabular-nums; }
.rows tr.recommended { font-weight: 600; }
@media (max-width: 640px) {
  .verdict { font-size: 1rem; } .verdict b { font-size: 1.2rem; }
  .rows { font-size: .85rem; }
  .rows td:nth-child(-n+2) { white-space: normal; } .rows th, .rows td { padding: .25rem .3rem; }
}
"""


class Failed(Exception):
    """A question that has no answer. The message is a sentence for the person who asked."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: the fields of the page.

    Attributes:
        model: a name, as behind ``hf:``.
        config: the uploaded ``config.json``, which counts instead of the name; None where there is none.
        seq: tokens in a sample; None for models that read none, and for the model's default.
        lora_rank: 0 where all weights are trained.
        fetch: whether ``config.json`` of a name that sacplan does not know is fetched from the hub.
    """

    model: str
    config: str | None = None
    device: str = "rtx-4090"
    batch: int = 1
    seq: int | None = None
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    lora_rank: int = 0
    in_4bit: bool = False
    fetch: bool = False

    def target(self, folder: Path) -> str:
        """Return the target; an uploaded configuration is copied into the folder where commands run."""
        if self.config is not None:
            shutil.copyfile(self.config, folder / "config.json")
            return "hf:config.json"
        name = self.model.strip().removeprefix("hf:")
        # A name, and no path of this machine.
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
            raise Failed("Name a model as on the hub, such as Qwen/Qwen3-8B, or upload its config.json.")
        return f"hf:{name}"

    def options(self, optimizer: str | None = None) -> list[str]:
        """Return the options of the command line that describe the step."""
        words = ["--device", self.device, "--batch", str(self.batch), "--dtype", self.dtype]
        words += ["--optimizer", optimizer or self.optimizer]
        words += [] if self.seq is None else ["--seq", str(self.seq)]
        words += ["--lora", f"r={self.lora_rank}"] if self.lora_rank else []
        words += ["--load-in-4bit"] if self.in_4bit else []
        words += ["--fetch"] if self.fetch and self.config is None else []
        return words


def run(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a command of sacplan, and return what it prints with ``--json``.

    Raises:
        Failed: with the command's own sentence; or it took too long, or ended without a word.
    """
    command = [sys.executable, "-m", "sacplan", *words, "--json"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise Failed(
            f"No answer within {SECONDS} seconds. Try a shorter sequence or a smaller model."
        ) from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise Failed(f"sacplan ended with exit code {done.returncode}: {last}") from None
    if "error" in answer:
        raise Failed(_sentence(answer["error"]["message"]))
    return answer


_FIELDS = {"--seq": "Tokens:", "--batch": "Batch:", "--lora": "LoRA rank:", "hf:config.json": "the file"}


def _sentence(message: str) -> str:
    """Name the fields of the page instead of options, and leave out advice on files."""
    message = message.replace(
        " Write a function that returns the model and a batch, and give it as train.py:make.", ""
    )
    for option, field in _FIELDS.items():
        message = message.replace(option, field)
    return message[:1].upper() + message[1:]


def picture(question: Question, target: str, answer: dict[str, Any], folder: Path) -> Any:
    """Draw the memory of the step over its time: as it is, and with the recommended plan."""
    plan = None
    optimizer = None
    if answer["run"]:
        words = shlex.split(answer["run"])
        run([*words[1:], "--force"], folder)  # behind "sacplan"; it writes plan.json
        plan = folder / "plan.json"
        optimizer = answer["recommended"]["optimizer"]
    profile = folder / "profile.json.gz"
    run(["profile", target, *question.options(optimizer), "-o", str(profile)], folder)
    return sacplan.Report(profile, plan).memory_figure(columns=1)


# --- what is shown ---------------------------------------------------------------------------------------------------


def verdict(answer: dict[str, Any]) -> str:
    """Write the verdict, with a color for each of the three answers."""
    kind, head = ("fits", "It fits.") if answer["fits"] else ("not", "It does not fit.")
    if not answer["fits"] and answer["recommended"] is not None:
        best = answer["recommended"]
        kind, head = "partly", f"Not as it is, but with {best['optimizer']}, {best['way']}."
    advice = " ".join(answer["advice"])
    return (
        f'<div class="verdict {kind}"><b>{html.escape(head)}</b>{html.escape(answer["verdict"])} '
        f"{html.escape(advice)}</div>"
    )


def failure(message: str) -> str:
    """Write why there is no answer."""
    return f'<div class="verdict not"><b>No answer</b>{html.escape(message)}</div>'


def table(answer: dict[str, Any]) -> str:
    """Write the rows: each way to run the step."""
    # What matters most comes first: on a phone the last columns have to be scrolled to.
    heads = ("optimizer", "way", "fits", "reserved", "peak", "step")
    lines = ["".join(_cell("th", i, head) for i, head in enumerate(heads))]
    for row in answer["rows"]:
        if row["same_as"] is not None:  # a plan that finds nothing to do
            continue
        fits = "yes" if row["fits"] else f"no, by {_over(row)}"
        step = "" if row["step_ms"] is None else f"{row['step_ms']:.1f} ms"
        cells = (
            row["optimizer"],
            row["way"],
            fits,
            _gib(row["reserved_bytes"]),
            _gib(row["peak_bytes"]),
            step,
        )
        lines.append("".join(_cell("td", i, text) for i, text in enumerate(cells)))
    best = answer["recommended"]
    shown = [row for row in answer["rows"] if row["same_as"] is None]
    marked = [f"<tr>{lines[0]}</tr>"]
    for row, line in zip(shown, lines[1:], strict=True):
        marked.append(f'<tr class="{"recommended" if row == best else ""}">{line}</tr>')
    return f'<div class="rows"><table>{"".join(marked)}</table></div>'


def _cell(tag: str, column: int, text: str) -> str:
    kind = ' class="number"' if column > 2 else ""
    return f"<{tag}{kind}>{html.escape(text)}</{tag}>"


def _gib(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / 2**30:.2f} GiB"


def _over(row: dict[str, Any]) -> str:
    """Write by how much a row is over its limit: the difference of the figures that are shown."""
    limit = row["limit_bytes"]
    printed = [round(n_bytes / 2**30, 2) for n_bytes in (limit + row["over_bytes"], limit)]
    return f"{printed[0] - printed[1]:.2f} GiB"


def code(question: Question, target: str, answer: dict[str, Any]) -> tuple[str, str]:
    """Return the command and the lines of Python to copy."""
    command = answer["run"] or shlex.join(["sacplan", "fit", target, *question.options()])
    return command, answer[
        "code"
    ] or "# Train as you do: no plan is needed, or none would help on this device."


Shown = tuple[Any, ...]
"""The values of the outputs: verdict, table, picture, command, Python."""

NOTHING = gr.update(visible=False)


def answers(question: Question) -> Iterator[Shown]:
    """Yield what is shown: the verdict as soon as it is known, then all of it with the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            target = question.target(folder)
            answer = run(["fit", target, *question.options(), "--no-sizes"], folder)
        except Failed as error:
            yield failure(str(error)), NOTHING, NOTHING, NOTHING, NOTHING
            return
        command, python = code(question, target, answer)
        said = [gr.update(value=text, visible=True) for text in (table(answer), command, python)]
        yield verdict(answer), said[0], NOTHING, said[1], said[2]
        try:
            drawn = gr.update(value=picture(question, target, answer, folder), visible=True)
        except Failed as error:
            # The verdict stands; only what belongs to the picture failed.
            yield verdict(answer) + failure(f"No picture: {error}"), said[0], NOTHING, said[1], said[2]
            return
        yield verdict(answer), said[0], drawn, said[1], said[2]


def _asked(
    model: str | None, config: str | None, device: str, batch: float, seq: float | None, dtype: str, optimizer: str,
    lora_rank: float, in_4bit: bool, fetch: bool,
) -> Iterator[Shown]:  # fmt: skip
    """Make a question of the page's fields. A field for a number that was emptied is None."""
    yield from answers(
        Question(
            model or "", config, device, int(batch or 1), None if not seq else int(seq), dtype, optimizer,
            int(lora_rank or 0), in_4bit, fetch,
        )
    )  # fmt: skip


def build() -> gr.Blocks:
    """Make the page. Its fonts are those of the system: nothing is loaded from other hosts."""
    with gr.Blocks(title="Will it fit?", analytics_enabled=False) as page:
        gr.Markdown(
            "# Will it fit?\n"
            "Whether one training step fits a GPU, without weights and without a GPU. "
            "If it does not: what would make it fit, and what that costs."
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                model = gr.Dropdown(
                    MODELS, value=MODELS[0], label="Model", allow_custom_value=True,
                    info="A name on the hub. Type any other that sacplan knows.",
                )  # fmt: skip
                config = gr.File(label="Or its config.json", file_types=[".json"], height=130)
                device = gr.Dropdown(DEVICES, value="rtx-4090", label="GPU", allow_custom_value=True)
                with gr.Row():
                    batch = gr.Number(1, label="Batch", info="samples", precision=0, minimum=1, min_width=140)
                    seq = gr.Number(
                        0, label="Tokens", info="0: the default", precision=0, minimum=0, min_width=140
                    )
                with gr.Row():
                    dtype = gr.Dropdown(DTYPES, value=DTYPES[0], label="dtype", min_width=140)
                    optimizer = gr.Dropdown(
                        OPTIMIZERS,
                        value=OPTIMIZERS[0],
                        label="Optimizer",
                        min_width=140,
                        allow_custom_value=True,
                    )
                with gr.Row():
                    lora = gr.Number(
                        0, label="LoRA rank", info="0: all weights", precision=0, minimum=0, min_width=140
                    )
                    in_4bit = gr.Checkbox(False, label="Load in 4 bit (QLoRA)", min_width=140)
                fetch = gr.Checkbox(
                    False,
                    label="Fetch config.json from the hub",
                    info="If sacplan does not know the name; no weights.",
                )
                go = gr.Button("Will it fit?", variant="primary")
            with gr.Column(scale=3, min_width=320):
                boxes: dict[str, Any] = {"wrap_lines": True, "max_lines": 12, "show_line_numbers": False}
                said = gr.HTML(
                    '<div class="verdict">Choose a model and a GPU. An answer takes some seconds.</div>'
                )
                rows = gr.HTML(visible=False)
                drawn = gr.Plot(show_label=False, visible=False, elem_id="picture")
                command = gr.Code(
                    label="Command", language="shell", visible=False, lines=2, elem_id="command", **boxes
                )
                python = gr.Code(
                    label="Python", language="python", visible=False, lines=2, elem_id="python", **boxes
                )
        fields = [model, config, device, batch, seq, dtype, optimizer, lora, in_4bit, fetch]
        go.click(_asked, fields, [said, rows, drawn, command, python], concurrency_limit=2)
    return page


def theme() -> gr.themes.Base:
    """Return Gradio's plain theme with the fonts of the system."""
    return gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


if __name__ == "__main__":
    build().launch(theme=theme(), css=STYLE)
