"""LoRA and QLoRA: the models that the libraries load, built without weights; their steps against real ones."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sacplan

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

import bitsandbytes
import peft
import transformers

from sacplan.device.devices import resolve_device
from sacplan.device.kernel_workspaces import kernel_workspace_bytes
from sacplan.device.op_kernels import Call
from sacplan.integrations.hf.lora import ALL_LINEAR, parse
from sacplan.integrations.hf.target import TargetError
from sacplan.torch_compat.allocations import allocation_deltas
from tests.support.commands import run
from tests.support.steps import bit_equal, grads_of

CONFIG = transformers.LlamaConfig(
    vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, use_cache=False,
)  # fmt: skip
NF4 = transformers.BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
LORA = peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=ALL_LINEAR, task_type="CAUSAL_LM")


def llama(place: str) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(place):
        model: torch.nn.Module = transformers.LlamaForCausalLM(CONFIG).bfloat16()
    return model


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(2 * 64).reshape(2, 64) % 96
    return {"input_ids": tokens, "labels": tokens}


def tensors_of(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """Every tensor of a model, and of the state beside its 4-bit weights."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, layer in model.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            state = layer.weight.quant_state
            found |= {f"{name}.{k}": v for k, v in vars(state).items() if isinstance(v, torch.Tensor)}
            found |= {
                f"{name}.2.{k}": v for k, v in vars(state.state2).items() if isinstance(v, torch.Tensor)
            }
    return {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in found.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_without_weights_it_is_the_model_that_transformers_loads(family: str, tmp_path: Path) -> None:
    """Layers, types, blocks and scales are those of ``from_pretrained(quantization_config=)``."""
    if family == "llama":
        config: Any = CONFIG
    else:  # its layers hold their weights transposed
        config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, n_positions=32, vocab_size=64)
    kind = transformers.AutoModelForCausalLM
    kind.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = kind.from_pretrained(
        tmp_path, quantization_config=NF4, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    # What peft asks a model for has another name by now.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    loaded = peft.prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)
    loaded = peft.get_peft_model(loaded, copy.deepcopy(LORA))
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16)
    made = sacplan.with_lora(model, LORA, NF4)
    assert tensors_of(made) == tensors_of(loaded)
    assert type(made) is type(loaded)
    assert all(p.is_meta for p in made.parameters())
    assert {p.dtype for p in made.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in made.parameters() if not p.requires_grad} == {torch.uint8, torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, NF4], ids=["lora", "qlora"])
def test_a_real_step_takes_what_is_predicted_without_weights(
    quantization: Any,
) -> None:
    """The peak of the smallest plan, to the byte: what a product dequantizes is made again, and counted."""
    optimizer = torch.optim.AdamW
    profile = sacplan.profile(
        sacplan.with_lora(llama("meta"), LORA, quantization), batch(), None, optimizer, "cpu"
    )
    model = sacplan.with_lora(llama("cpu"), LORA, quantization)
    for plan in (sacplan.plan(profile, "100%"), sacplan.plan(profile, "smallest")):
        seen = sacplan.verify(model, batch(), plan, None, optimizer, run="real")
        assert seen.peak_bytes == seen.predicted_peak_bytes == plan.peak_bytes
        assert not seen.differences
    if quantization is not None:
        again = {op.name for op in profile.with_plan(plan).ops if op.recomputes >= 0}
        assert "bitsandbytes.gemm_4bit.default" in again


@pytest.mark.parametrize("quantization", [None, NF4], ids=["lora", "qlora"])
def test_gradients_are_bit_equal(quantization: Any) -> None:
    model = sacplan.with_lora(llama("cpu"), LORA, quantization)
    plan = sacplan.plan(sacplan.profile(model, batch(), device="cpu"), "smallest")
    expected = grads_of(model, batch(), lambda model, given: model(**given).loss)
    with sacplan.apply(model, plan) as handle:
        found = grads_of(model, batch(), lambda model, given: model(**given).loss)
        assert handle.differences == ()
    assert len(found) == 1 + 2 * 7 * 2  # with the loss
    assert bit_equal(expected, found)


@pytest.mark.parametrize("nested", [False, True])
def test_temporaries_of_a_product_are_those_of_the_cuda_code(nested: bool) -> None:
    """bitsandbytes' own function, run on a CPU with kernels that only allocate."""
    path = Path(inspect.getfile(bitsandbytes)).parent / "backends/cuda/ops.py"
    tree = ast.parse(path.read_text())
    code = next(
        n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_dequant_linear_fallback"
    )
    room: dict[str, Any] = {"torch": torch}
    room |= dict.fromkeys(("_dequantize_4bit_impl", "_dequantize_blockwise_impl"), lambda *a, **k: None)
    exec(compile(ast.Module([code], []), str(path), "exec"), room)
    n, k, m = 192, 128, 512
    scales = n * k // 64
    args: list[Any] = [
        torch.ones(m, k),
        torch.zeros(n * k // 2, 1, dtype=torch.uint8),
        [n, k],
        torch.ones(scales),
        64,
        "nf4",
    ]
    state: dict[str, Any] = {}
    if nested:
        state = {
            "absmax_8bit": torch.zeros(scales, dtype=torch.uint8),
            "absmax_code": torch.ones(256),
            "absmax_offset": torch.ones(()),
        }
    live = peak = 0
    out: list[torch.Tensor] = []
    for delta in allocation_deltas(lambda: out.append(room["_dequant_linear_fallback"](*args, **state))):
        live += delta
        peak = max(peak, live)
    spec = resolve_device("rtx-4090")
    op = torch.ops.bitsandbytes.gemm_4bit.default
    assert kernel_workspace_bytes(Call(op, args, state, out[0]), spec) == peak - out[0].nbytes


def test_models_and_quantizations_that_are_not_modelled() -> None:
    with pytest.raises(sacplan.errors.TraceError, match="only models of transformers"):
        sacplan.with_lora(torch.nn.Linear(4, 4), None, NF4)
    in_8 = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(sacplan.errors.TraceError, match="load_in_4bit=True"):
        sacplan.with_lora(llama("meta"), LORA, in_8)


@pytest.mark.parametrize("wrong", [1, "r=16", [], torch.nn.Linear, 2**80])
def test_arguments_of_another_type(wrong: Any) -> None:
    with pytest.raises(sacplan.errors.TraceError, match=r"must be an nn\.Module"):
        sacplan.with_lora(wrong, LORA)
    with pytest.raises(sacplan.errors.TraceError, match=r"must be a peft\.LoraConfig"):
        sacplan.with_lora(llama("meta"), wrong)


def test_modules_that_are_not_there() -> None:
    with pytest.raises(sacplan.errors.TraceError, match="nowhere"):
        sacplan.with_lora(llama("meta"), peft.LoraConfig(target_modules=["nowhere"]))


def test_weights_can_be_quantized_after_a_model_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes keeps one map for all; it must not be on the meta device from then on."""
    monkeypatch.setattr(bitsandbytes.functional, "name2qmap", {})
    sacplan.with_lora(llama("meta"), LORA, NF4)
    model: Any = sacplan.with_lora(llama("cpu"), LORA, NF4)
    assert torch.isfinite(model(**batch()).loss)


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(sacplan.errors.TraceError, match=r"pip install 'sacplan\[lora\]'"):
        sacplan.with_lora(llama("meta"), LORA)


# --- several GPUs


def test_fully_shard_keeps_the_types_of_frozen_parameters() -> None:
    """Two bytes more for each frozen parameter in bfloat16, where a trainer makes all of them float32."""
    model = sacplan.with_lora(llama("meta"), LORA)
    units = ["base_model.model.model.layers.*", ""]
    profile = sacplan.profile(model, batch(), device="h100", ranks=sacplan.FSDP2(4, units))
    as_float32 = sacplan.with_lora(llama("meta").float(), LORA)
    upcast = sacplan.profile(as_float32, batch(), device="h100", ranks=sacplan.FSDP2(4, units))
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert upcast.peak_bytes > profile.peak_bytes + frozen_bytes // 4


# --- the command line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("16", {"r": 16, "target_modules": ALL_LINEAR}),
        ("r=16", {"r": 16, "target_modules": ALL_LINEAR}),
        (
            "r=4, alpha=8,dropout=0.1,targets=q_proj+v_proj",
            {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
        ),
    ],
)
def test_adapters_in_a_word(text: str, found: dict[str, Any]) -> None:
    assert parse(text) == found


@pytest.mark.parametrize("text", ["", "r=many", "rang=4"])
def test_words_that_are_no_adapters(text: str) -> None:
    with pytest.raises(TargetError, match="--lora"):
        parse(text)


@pytest.mark.slow
def test_a_plan_for_qlora_is_verified_as_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CONFIG.save_pretrained(".")
    made = run(
        "plan hf:config.json --lora r=4,dropout=0.1 --load-in-4bit --seq 64 --budget 90% --device cpu "
        "-o plan.json --json"
    )
    assert made.exit_code == 0, made.stderr
    facts = json.loads(made.stdout)["hf"]
    chosen = {name: facts[name] for name in ("lora", "load_in_4bit", "autocast")}
    assert chosen == {"lora": "r=4,dropout=0.1", "load_in_4bit": True, "autocast": "bfloat16"}
    assert facts["trained"] < facts["parameters"] == sum(p.numel() for p in llama("meta").parameters())
    seen = run("verify hf:config.json plan.json --json")
    assert seen.exit_code == 0, seen.stderr
    assert "--lora r=4,dropout=0.1 --load-in-4bit: from plan.json" in seen.stderr
    found = SimpleNamespace(**json.loads(seen.stdout))
    assert found.peak_bytes == found.predicted_peak_bytes <= found.budget_bytes


def test_weights_stored_as_floats_stay_in_one_type() -> None:
    """As recipes for FSDP have it: 4-bit weights, norms and adapters in bfloat16, with the bytes of packed weights."""
    quantization = copy.deepcopy(NF4)
    quantization.bnb_4bit_quant_storage = torch.bfloat16
    model = sacplan.with_lora(llama("meta"), LORA, quantization)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    as_bytes = sacplan.with_lora(llama("meta"), LORA, NF4)
    assert {p.dtype for p in as_bytes.parameters()} == {torch.float32, torch.uint8}
    packed = [
        sum(p.nbytes for p in one.parameters() if type(p).__name__ == "Params4bit")
        for one in (model, as_bytes)
    ]
    assert packed[0] == packed[1]
    prepared = sacplan.with_lora(llama("meta"), LORA, quantization, prepare=True)
    assert {p.dtype for p in prepared.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.slow
def test_a_verdict_for_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are found although autocast frees its copies of weights in another order in each recording."""
    monkeypatch.chdir(tmp_path)
    CONFIG.save_pretrained(".")
    made = run("fit hf:config.json --lora r=4 --load-in-4bit --seq 128 --device l4 --json")
    assert made.exit_code == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["fits"]
    asked = [row for row in found["rows"] if row["optimizer"] == found["rows"][0]["optimizer"]]
    assert all(row["largest_batch"] > 1 for row in asked)
    bad = run("profile hf:config.json --lora targets=conv --seq 32")
    assert bad.exit_code == 2
    assert "conv" in bad.stderr
