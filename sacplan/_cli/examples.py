"""What ``--help`` shows to be copied; the tests run every line."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "sacplan plan hf:gpt2 --batch 16 --seq 1024 --budget 70% -o plan.json",
        "sacplan verify hf:gpt2 plan.json",
    ),
    "profile": (
        "sacplan profile train.py:make --device h100 -o profile.json.gz",
        "sacplan profile hf:gpt2 --batch 16 --seq 1024 -o profile.json.gz",
        "sacplan profile hf:config.json --dtype float32 --optimizer none --json",
    ),
    "plan": (
        "sacplan plan train.py:make --budget 70% -o plan.json",
        "sacplan plan profile.json.gz --budget 70% --objective flops --json",
        "sacplan plan train.py --budget 90% --keep aten.gelu --never 'layers.0*'",
        "sacplan plan hf:meta-llama/Meta-Llama-3-8B --seq 4096 --optimizer adamw-fused --budget 70GiB -o llama.json",
        "sacplan plan hf:meta-llama/Meta-Llama-3-8B --device h100 --world-size 8 --fsdp-unit 'model.layers.*' "
        "--fsdp-unit '' --budget 60GiB --batch 1 --seq 8192",
    ),
    "verify": (
        "sacplan verify train.py:make plan.json",
        "sacplan verify train.py:make plan-cpu.json --run real",
        "sacplan verify hf:meta-llama/Meta-Llama-3-8B llama.json",
    ),
    "frontier": (
        "sacplan frontier profile.json.gz -o curve.csv",
        "sacplan frontier train.py:make --points 4 --no-policies --json",
    ),
    "report": (
        "sacplan report profile.json.gz plan.json -o report.html",
        "sacplan report train.py:make --budget 70% -o report.html --png pictures --trace memory.json",
    ),
    "max-batch": (
        "sacplan max-batch hf:gpt2 --seq 1024 --device rtx-4090 -o plan.json",
        "sacplan max-batch train.py:make --budget 2GiB --at-most 64",
    ),
    "throughput": (
        "sacplan throughput train.py:make --budget 2GiB --at-most 8 --json",
        "sacplan throughput hf:bert-base --seq 512 --device a100-40gb --headroom 10%",
    ),
    "devices": (
        "sacplan devices",
        "sacplan devices --json",
    ),
}
