"""The Python samples of the book, run as a reader would: those of a page one after the other, in one directory.

A sample whose packages are not installed is skipped.
"""

import ast
import importlib.util
import json
import re
import shutil

import pytest
from conftest import FIXTURES

BOOK = FIXTURES.parents[1] / "docs" / "src"
PAGES = sorted(page for page in BOOK.rglob("*.md") if "```python\n" in page.read_text()) if BOOK.exists() else []
SAMPLE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def packages(sample):
    """Return the names of the packages that a sample imports."""
    found = set()
    for node in ast.walk(ast.parse(sample)):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    if '"torch"' in sample:
        found.add("torch")
    if "torch.utils.tensorboard" in sample:
        # It comes with torch, but not what it imports.
        found.add("tensorboard")
    return {name.partition(".")[0] for name in found}


def make_run(directory):
    """Make a run with the metrics that `fsdp train` writes."""
    directory.mkdir(parents=True)
    lines = []
    for step in range(3):
        norm = None if step == 0 else 1.0
        lines.append({"step": step, "loss": 5.0 - step, "lr": 1e-3, "grad_norm": norm, "tokens_per_s": 9.0, "time": 1e9})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def one_rank():
    """Be the only rank of a process group, where torch is installed: background saves need one."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def names_of_torch(page):
    """Return what the samples of a page take for given, and make the checkpoints that they load."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if page.name == "pytorch.md":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model_state, optim_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id="runs/demo/step-00000300")
    return {"model": model, "optimizer": optimizer, "state": {"weight": torch.ones(4)}}


def make_adapter():
    """Make the tiny Llama and the adapter of the tutorial, as the libraries of Hugging Face write them."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(config)
    model.save_pretrained("runs/tiny-llama")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained("runs/lora/adapter")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(BOOK)))
@pytest.mark.usefixtures("one_rank")
def test_the_samples_of_a_page_run(page, tmp_path, monkeypatch):
    samples = SAMPLE.findall(page.read_text())
    assert samples
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    make_run(tmp_path / "runs" / "demo")
    for name in ("pytorch", "step-20", "step-1000"):
        shutil.copytree(FIXTURES / "fsdp2_adamw_ws2" / "dcp", tmp_path / name)
    missing = {name for sample in samples for name in packages(sample) if importlib.util.find_spec(name) is None}
    names = names_of_torch(page)
    if page.name == "lora.md" and not missing:
        make_adapter()
    ran = 0
    for sample in samples:
        if packages(sample) & missing:
            continue
        try:
            exec(compile(sample, str(page), "exec"), names)
        except NameError:
            # What it uses was imported by a sample that was skipped.
            if not missing:
                raise
            continue
        ran += 1
    if ran < len(samples):
        pytest.skip(f"{ran} of {len(samples)} samples ran; not installed: {', '.join(sorted(missing))}")
