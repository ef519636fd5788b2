"""llama.cpp's own server, from the xllamacpp wheel: `python -m dspark.cli.bench.llama_cpp_server
FILE SETTINGS`, the settings as JSON. Prints its address as JSON and runs until standard input ends
or it is told to."""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    xllamacpp = importlib.import_module("xllamacpp")
    settings = json.loads(sys.argv[2])
    flash = xllamacpp.llama_flash_attn_type
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["slots"] * settings["context"]
    params.n_batch, params.n_ubatch = settings["batch"], settings["ubatch"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.flash_attn_type = (
        flash.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if settings["flash"]
        else flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    if settings["ngram"]:
        kinds = xllamacpp.common_speculative_type
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    params.fit_params = False  # take what was asked for or fail
    params.cache_ram_mib = 0  # no prompt comes twice: keeping old ones would only cost it time
    params.verbosity = 0
    server = xllamacpp.Server(params)
    ready = {"url": server.listening_address, "system": xllamacpp.get_system_info().strip()}
    print(json.dumps(ready), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
