"""vLLM's in-process engine as one thread drives it: requests in, whole completions out, weights exchanged in between.

    add ──> held ──> scheduler (steps) ──> model ──> our draw (sampler) ──> steps ──> the request, told when it is done

vLLM's own output path (detokenizing, a `RequestOutput` a request and step) is left out.

Invariants:
- One thread at a time: the engine's own, or the trainer's while the engine's stands still.
- A token's version is that of the weights its step was launched with: with asynchronous scheduling a step may be under
  way while the one before it is read.
- A prompt never meets keys and values of older weights: the prefix cache is salted with the number of loads.
- Written against vLLM 0.25.1 and 0.32: what is private there is touched in this folder alone.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palingenesis.rl.engines.vllm.decode import DecodeGraphs, can_decode
from palingenesis.rl.engines.vllm.graphs import JoinGraphs, can_capture, changed
from palingenesis.rl.engines.vllm.residual import COMPILED_WITH, widen_residuals
from palingenesis.rl.engines.vllm.sampler import install
from palingenesis.rl.engines.vllm.steps import Running, Steps
from palingenesis.rl.errors import ConfigError, EngineError
from palingenesis.rl.observe.waits import wait_for
from palingenesis.rl.types import Completion, SamplingParams, Weights

# Read when vllm is imported; what the user has set stays.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # ours draws; flashinfer would compile its own at start
}
# With `quantization: fp8` only the weights are FP8, as the trainer's are: inputs rounded as well put 0.10 between the two
# log-probs of a token of SmolLM2's, and a trainer that rounded them, too, would often round the other way
# (bench/rounding.py). vLLM has such kernels, Marlin's, for GPUs that cannot multiply FP8; elsewhere 0.25.1 takes them when
# the environment says so, and 0.32 when the argument does.
WEIGHTS_ALONE = "fp8"
# A step that somebody joins costs everybody c more, and who waits for others loses half of the wait: with turns of T seconds
# the least is lost at sqrt(2 c T), 25 ms for a join of 1 ms and turns of 0.3 s.
ADMIT_S = 0.03
ADMIT_SHARE = 8  # an eighth of the running sequences or more join at once
# Steps that are launched before the first of them is read. vLLM's own leave the host one step of the GPU for its work; one
# that somebody joins takes it 4 ms, where the GPU takes 1 to 2 for a step of a small model (one H200).
UNDER_WAY = 3
GPU_S = 300.0  # a step takes milliseconds
SLEEP_LEVEL = 2  # the trainer has the weights: nothing needs to be kept on the host


@dataclass(frozen=True)
class VLLMOptions:
    """What the engine is built with; names as in `rollout.*`.

    Attributes:
        model: folder of a Hugging Face checkpoint.
        dtype: `bfloat16`, `float32`, ...
        device: `cuda` or `cpu`.
        max_num_seqs: sequences decoded at once.
        sleep: the engine can give its memory back.
        extra: `rollout.vllm_args`, over all others.
    """

    model: str
    dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.3
    prefix_caching: bool = True
    sleep: bool = False
    kv_cache_dtype: str = ""
    quantization: str = ""
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantized(self) -> str:
        """The quantization in use, or none."""
        return str(self.extra.get("quantization", self.quantization) or "")

    def engine_args(self) -> dict[str, Any]:
        """Arguments of `vllm.EngineArgs`."""
        args: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "skip_tokenizer_init": True,  # ids in, ids out
            "generation_config": "vllm",  # not the checkpoint's top-k and penalties
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enable_prefix_caching": self.prefix_caching,
            "kv_cache_dtype": self.kv_cache_dtype or "auto",
            "quantization": self.quantization or None,
            "seed": self.seed,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self.device == "cuda":
            args |= {"gpu_memory_utilization": self.gpu_memory_utilization, "enable_sleep_mode": self.sleep}
            seqs = self.extra.get("max_num_seqs", self.max_num_seqs)
            args |= {"compilation_config": {"cudagraph_capture_sizes": graph_sizes(seqs)}}
        else:
            args |= {"enforce_eager": True}
        if self.quantized == WEIGHTS_ALONE:
            args |= {"linear_backend": "marlin"}
        args |= _for_model(self.model)
        config = COMPILED_WITH | args.get("additional_config", {}) | self.extra.get("additional_config", {})
        return args | dict(self.extra) | {"additional_config": config}


class Core:
    """Owns vLLM's `LLMEngine`.

    Args:
        options: see `VLLMOptions`.

    Attributes:
        steps: the way between vLLM's scheduler and our requests.
        held: requests that have not joined the batch yet, in the order they came.
        patience: seconds that one may be held for others.

    Raises:
        ConfigError: `vllm_args` names what vLLM does not know.
        EngineError: vLLM cannot be imported or does not start.
    """

    def __init__(self, options: VLLMOptions) -> None:
        self.options = options
        self.asleep = False
        self._stale = False  # asleep or just awake: the weights are not there
        self._number = self._loads = 0
        self.held: dict[str, Running] = {}
        self._admitted = 0.0  # when requests joined last
        self.stream = _urgent_stream() if options.device == "cuda" else None
        self.llm = _start(options, self.stream)
        self._client = self.llm.engine_core
        self._engine = self._client.engine_core
        self._runner = self.llm.model_executor.driver_worker.model_runner
        self._check_weights_alone()
        self._seeds_by_vllm = hasattr(self._runner.sampler, "sampling_states")  # the older runner would make generators
        self._graphs: list[JoinGraphs | DecodeGraphs] = []
        self._under_way = self._engine.batch_queue_size  # that there is room for
        self._engine.batch_queue_size = self.llm.vllm_config.max_concurrent_batches
        self.steps = Steps(self._engine.scheduler, self.llm.model_config.max_model_len, self._under_way)
        self.patience = ADMIT_S
        self._undo = install(self._runner, self._seed_of)
        with _one_message("capture its graphs"), self.on_stream():
            self._capture()
        self._take_over()

    def _check_weights_alone(self) -> None:
        """Whether inputs are rounded depends on the kernels that vLLM has found."""
        if self.options.quantized != WEIGHTS_ALONE:
            return
        methods: Iterator[Any] = (getattr(module, "quant_method", None) for module in self._runner.model.modules())
        kernels = {type(method.fp8_linear).__name__ for method in methods if hasattr(method, "fp8_linear")}
        others = sorted(name for name in kernels if not name.startswith("Marlin"))
        if others:
            raise EngineError(
                f"vLLM multiplies FP8 inputs ({others[0]}), where rollout.quantization: fp8 is of the weights alone; set "
                "it to fp8_per_tensor or fp8_per_channel."
            )

    def _capture(self) -> None:
        """Graphs of our own, where we can make them; the head is ours by now."""
        attention = None
        if can_decode(self._runner):
            from palingenesis.rl.engines.vllm.attention import JoinAttention  # needs triton, which a GPU's vLLM brings

            self._graphs.append(DecodeGraphs(self._runner))
            model, parallel = self.llm.model_config, self.llm.vllm_config.parallel_config
            group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
            attention = partial(JoinAttention, positions=self._runner.input_buffers.positions, group=group)
        if can_capture(self._runner):
            joins = JoinGraphs(self._runner, self.llm.model_config.max_model_len, attention)
            self._graphs.append(joins)
            self.steps.in_graph = joins.tokens

    def on_stream(self) -> AbstractContextManager[Any]:
        """Where the engine's kernels go, whichever thread launches them. vLLM takes the stream it is built on for its own;
        built on the default one it would wait, step by step, for whatever the trainer has launched there."""
        import torch

        return torch.cuda.stream(self.stream)  # nothing without a GPU

    def exchange(self) -> None:
        """Put our draw, our steps and our graphs in the place of vLLM's."""
        self._undo = install(self._runner, self._seed_of)
        self._take_over()

    def _take_over(self) -> None:
        for one in (self.steps, *self._graphs):
            one.take_over()
        if self._graphs:
            self._engine.batch_queue_size = self._under_way

    def restore(self) -> None:
        """Give vLLM its own back, when no requests run: what benchmarks measure against."""
        while self.busy:
            self.step()
        self._engine.batch_queue_size = self.llm.vllm_config.max_concurrent_batches
        self._let_go()

    def _let_go(self) -> None:
        self._undo()
        for one in (self.steps, *self._graphs):
            one.let_go()

    # --- requests ---

    def add(
        self, prompt: tuple[int, ...], params: SamplingParams, done: Callable[[Completion | Exception], None]
    ) -> str:
        """Take a request, which joins the batch at one of the next steps; returns its id.

        Raises:
            EngineError: vLLM refuses it.
        """
        from vllm import SamplingParams as Sampling

        name = f"p{self._number}"
        self._number += 1
        try:
            sampling = Sampling(
                temperature=params.temperature,
                max_tokens=params.max_new_tokens,
                stop_token_ids=list(params.stop_token_ids),
                ignore_eos=True,  # the stop tokens are these, not the checkpoint's
                seed=params.seed if self._seeds_by_vllm else None,
                detokenize=False,
                skip_clone=True,  # it is this request's alone
            )
            inputs = {"type": "token", "prompt_token_ids": list(prompt)}
            request = self.llm.input_processor.process_inputs(
                name, inputs, sampling, supported_tasks=self.llm.get_supported_tasks()
            )
        except Exception as error:  # vLLM validates with exceptions of several kinds
            raise _refused(prompt, error) from error
        self.held[name] = Running(prompt, params, done, request, stops=frozenset(params.stop_token_ids))
        return name

    def _admit(self) -> None:
        """Let those that are held join the batch: at once when they are many beside it, else every `patience` seconds."""
        running = len(self.steps.running)
        joining = list(self.held)[: self._engine.scheduler.max_num_running_reqs - running]
        now = time.monotonic()
        if not joining or (len(joining) * ADMIT_SHARE < running and now - self._admitted < self.patience):
            return
        self._admitted = now
        for name in joining:
            own = self.held.pop(name)
            own.request.cache_salt = self._salt
            try:
                self._client.add_request(own.request)
            except Exception as error:  # noqa: BLE001 - vLLM validates with exceptions of several kinds
                own.done(_refused(own.prompt, error))
                continue
            own.request = self._engine.scheduler.requests[name]
            self.steps.running[name] = own

    def _seed_of(self, name: str) -> int:
        own = self.steps.running.get(name)
        return own.params.seed if own else 0

    @property
    def _salt(self) -> str:
        """Keys and values are shared between requests of one salt."""
        return f"load{self._loads}"

    def abort(self, name: str) -> None:
        """Forget a request; nothing if it is already done."""
        if self.held.pop(name, None) is None and self.steps.running.pop(name, None) is not None:
            self._client.abort_requests([name])

    def forget(self) -> list[Callable[[Completion | Exception], None]]:
        """Drop every request after a failure; returns whom to tell."""
        told = [own.done for own in (*self.held.values(), *self.steps.running.values())]
        self.held, self.steps.running = {}, {}
        return told

    @property
    def requests(self) -> int:
        """Requests that are not done."""
        return len(self.held) + len(self.steps.running)

    @property
    def busy(self) -> bool:
        """There is a step to make, or one under way."""
        return bool(self.held or self._engine.scheduler.has_requests() or self._engine.batch_queue)

    def step(self) -> None:
        """One step; finished requests are told."""
        self._admit()
        with self.on_stream():
            _, executed = self._engine.step_fn()
            self._engine.post_step(executed)

    # --- weights and memory ---

    def load(self, weights: Weights) -> None:
        """Take new weights, between two steps. Running requests keep their keys and values.

        Raises:
            EngineError: names or shapes do not fit.
        """
        import torch

        if self.asleep:
            with _one_message("wake up"):
                _free_cached_memory()
                self.llm.wake_up(["weights"])
        _synchronize()
        loaded: list[str] = []
        with torch.no_grad():
            self._load(_counted(self._renamed(weights.tensors()), loaded))
        _synchronize()
        if not loaded:
            raise EngineError("the policy sent no weights to vLLM.")
        self.steps.version = weights.version
        self._loads += 1
        self._salt_those_that_wait()
        self._stale = False

    def _salt_those_that_wait(self) -> None:
        """Requests that were admitted before this load and start after it must not find blocks of the older weights."""
        from vllm.v1.request import RequestStatus

        for own in self.steps.running.values():
            request = own.request
            if request.status == RequestStatus.WAITING and not request.num_computed_tokens:
                request.cache_salt = self._salt
                del request.block_hashes[:]
                request.update_block_hashes()

    def _load(self, tensors: Iterator[tuple[str, Any]]) -> None:
        try:
            if self.options.quantized or self.options.device == "cpu":  # weights in a form of the kernels' own
                with _same_workspaces(self._runner.model):
                    self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            else:
                self._runner.model.load_weights(tensors)
        except (KeyError, ValueError, AssertionError, RuntimeError) as error:
            raise EngineError(f"vLLM cannot take the policy's weights: {type(error).__name__}: {error}") from error

    def _renamed(self, tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Names as the engine's class expects them: a text model inside a multi-modal one has a prefix of its own."""
        inside = hasattr(self._runner.model, "language_model")
        for name, tensor in tensors:
            yield (f"model.language_model.{name[6:]}" if inside and name.startswith("model.") else name), tensor

    def sleep(self) -> None:
        """Give the memory back. Weights have to be loaded before the next step.

        Raises:
            EngineError: requests are running.
        """
        if self.requests:
            raise EngineError(f"the engine was sent to sleep with {self.requests} requests running.")
        with _one_message("go to sleep"):
            while self.busy:
                self.step()
            _synchronize()
            with self.on_stream():
                self.llm.sleep(level=SLEEP_LEVEL)
        self.asleep = self._stale = True

    def wake(self) -> None:
        """Take the memory back; the weights were loaded already."""
        if self._stale:
            raise EngineError("the engine was woken before weights were loaded.")
        with _one_message("wake up"):
            _free_cached_memory()
            with self.on_stream():
                self.llm.wake_up(["kv_cache"])
                for graphs in self._graphs:
                    graphs.woken()
        self.asleep = False

    def close(self) -> None:
        self._let_go()
        self._graphs.clear()  # they hold the model, and so does what undoes the draw: vLLM gives its memory back
        del self._undo
        self.llm.engine_core.shutdown()


def fp8_groups(model: Any) -> list[tuple[str, ...]]:
    """Checkpoint names of the weights that vLLM rounds to FP8 under one scale, where it makes several one matrix together.

    Args:
        model: vLLM's.
    """
    packed = getattr(model, "packed_modules_mapping", {})
    groups = []
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        owner, _, leaf = name.removeprefix("language_model.").rpartition(".")
        if method == "Fp8PerTensorOnlineLinearMethod":
            groups.append(tuple(f"{owner}.{part}.weight" for part in packed.get(leaf, [leaf])))
        elif method == "Fp8PerTensorOnlineMoEMethod":  # a scale an expert, of which the trainer knows nothing
            groups.append((f"{owner}.{leaf}",))
    return groups


@contextmanager
def _same_workspaces(model: Any) -> Iterator[None]:
    """Marlin's kernels count in a workspace, which a reload makes anew: captured ones would go on with one that is freed."""
    import torch

    kept = [(module, module.workspace) for module in model.modules() if hasattr(module, "workspace")]
    yield
    with torch.inference_mode():
        for module, workspace in kept:
            module.workspace = workspace.zero_()  # after a sleep it holds whatever the memory held


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Tokens of a step for which vLLM captures graphs: its own choice, which would end at 512 however many may decode."""
    top = max(max_num_seqs, min(2 * max_num_seqs, 512))
    return sorted({1, 2, 4, *range(8, min(top, 256), 8), *range(256, top + 1, 16), max_num_seqs})


def _refused(prompt: tuple[int, ...], error: Exception) -> EngineError:
    return EngineError(f"vLLM refused a prompt of {len(prompt)} tokens: {error}")


def _for_model(folder: str) -> dict[str, Any]:
    """What the architecture asks for: no vision tower for a policy that reads text, and for linear attention the kernels
    that are there (vLLM takes flashinfer's for granted)."""
    config = Path(folder) / "config.json"
    values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    args: dict[str, Any] = {}
    if "vision_config" in values:
        args |= {"language_model_only": True, "limit_mm_per_prompt": {"image": 0, "video": 0}}
    if "linear_num_key_heads" in values.get("text_config", values) and find_spec("flashinfer") is None:
        args |= {"additional_config": {"gdn_prefill_backend": "triton"}}
    return args


def _start(options: VLLMOptions, stream: Any) -> Any:
    """Build vLLM's engine on `stream`."""
    import torch

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if options.quantized == WEIGHTS_ALONE:
        os.environ["VLLM_TEST_FORCE_FP8_MARLIN"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # whatever the shell says: the engine is this process's
    try:
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise EngineError(
            f"rollout.backend: vllm cannot be imported ({error}); install it with `pip install 'palingenesis[vllm]'`, or "
            "set rollout.backend to hf."
        ) from error
    try:
        args = EngineArgs(**options.engine_args())
    except TypeError as error:
        raise ConfigError(f"rollout.vllm_args: {str(error).removeprefix('EngineArgs.__init__() ')}.") from error
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        raise ConfigError("rollout.vllm_args: an engine has one GPU; remove the parallel sizes.")
    widen_residuals()
    try:
        # not before vllm is imported, which keeps an account of the current stream
        with torch.cuda.stream(stream), _room_for(UNDER_WAY):
            return LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
    except Exception as error:  # whatever keeps it from starting, the user needs one message
        raise EngineError(_why_not_started(error, options)) from error


@contextmanager
def _room_for(steps: int) -> Iterator[None]:
    """vLLM's engine is built with a queue, and its newer runner with buffers, for that many steps under way."""
    from vllm.config import VllmConfig

    vllms = VllmConfig.max_concurrent_batches.fget

    def most(config: Any) -> int:
        own = int(vllms(config))
        return max(own, steps) if own > 1 and config.use_v2_model_runner else own

    with changed(VllmConfig, max_concurrent_batches=property(most)):
        yield


def _urgent_stream() -> Any:
    """A stream whose kernels go before those of the trainer that have not begun: a step is some 300 short kernels, and each
    would wait for a long one. A captured kernel keeps the priority of the stream that it was captured on."""
    import torch

    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
    return torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]


def _why_not_started(error: Exception, options: VLLMOptions) -> str:
    """One message for a failed start, with the cure where it is known."""
    text = " ".join(str(error).split())
    known = {
        "memory": "raise rollout.gpu_memory_utilization, or lower rollout.max_model_len or rollout.max_num_seqs",
        "KV cache": "raise rollout.gpu_memory_utilization, or lower rollout.max_model_len",
        "architectures": "use a model that this vLLM knows, a newer vLLM, or rollout.backend hf",
        "quantization": "set rollout.quantization to a method that this vLLM knows",
    }
    cure = next((cure for word, cure in known.items() if word in text), "its own log: VLLM_LOGGING_LEVEL=INFO")
    return f"vLLM did not start with {options.model}: {type(error).__name__}: {text[:600]}\n  {cure}"


def _counted(tensors: Iterator[tuple[str, Any]], into: list[str]) -> Iterator[tuple[str, Any]]:
    for name, tensor in tensors:
        into.append(name)
        yield name, tensor


@contextmanager
def _one_message(what: str) -> Iterator[None]:
    """vLLM's failures of memory are assertions and out-of-memory errors of several kinds."""
    try:
        yield
    except Exception as error:
        raise EngineError(
            f"vLLM could not {what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}\n  where memory is short, "
            "lower rollout.gpu_memory_utilization or train.micro_tokens; rollout.sleep: false keeps vLLM awake"
        ) from error


def _free_cached_memory() -> None:
    """What the trainer has freed is cached by torch, and would be missing where vLLM takes its own back."""
    import torch

    torch.cuda.empty_cache()


def _synchronize() -> None:
    """The trainer and the engine use streams of their own. A device that hangs is noticed: the wait is another thread's."""
    import torch

    if torch.cuda.is_available():
        waiter = threading.Thread(target=torch.cuda.synchronize, args=(torch.cuda.current_device(),), daemon=True)
        waiter.start()
        wait_for(partial(_has_ended, waiter), "engine", "the GPU to finish the step under way", GPU_S)


def _has_ended(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()
