"""The engines by the names of `--engine`."""

from gristmill_recorder.engines.dynamo import DYNAMO
from gristmill_recorder.engines.llamacpp import LLAMACPP
from gristmill_recorder.engines.sglang import SGLANG
from gristmill_recorder.engines.vllm import VLLM

ENGINES = {"vllm": VLLM, "sglang": SGLANG, "dynamo": DYNAMO, "llamacpp": LLAMACPP}
