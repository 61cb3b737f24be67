"""Table of every SGLang name that LAPS hooks, replaces, overrides, sets, uses or follows. ``seams`` checks it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Use = Literal["hooked", "replaced", "overridden", "set", "used", "followed"]
"""`overridden`: by a subclass, or the class that is subclassed. `set`: an attribute of an instance or of the class.
`used`: called in LAPS's own way. `followed`: LAPS's code does the same steps, so the source is checked."""


class Seam(NamedTuple):
    """One SGLang name."""

    name: str
    """Dotted name below ``sglang.srt``."""
    use: Use
    where: str
    """LAPS's module, or several."""
    expected: str | None
    """Expectation for the newest release (``compat``: for others). Function or class: its parameters (`name=` with a
    default). `followed`: digests of the source as released and as ``laps-patch apply --server`` has it. None: the name
    only has to exist. An attribute in brackets is made by the class at run time, and not looked for."""


_SCHEDULER, _ADDER = "managers.scheduler.Scheduler", "managers.schedule_policy.PrefillAdder"
_KV = "disaggregation.common.conn.CommonKVManager"
_LOOPS = "disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_RECORDER = "eplb.expert_distribution._ExpertDistributionRecorderReal"
_PENALTIES = "managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
_PIPELINE = "managers.scheduler_pp_mixin.SchedulerPPMixin"

_MANAGER, _STATS = "managers.tokenizer_manager.TokenizerManager", "observability.req_time_stats"
_STREAMER = "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_PROFILER = "managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
_REPORTER = "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"

_RECEIPTS: tuple[Seam, ...] = (
    Seam(f"{_STATS}.APIServerReqTimeStats.__getstate__", "hooked", "moments", "self"),
    Seam(f"{_STATS}.DPControllerReqTimeStats.__getstate__", "hooked", "moments", "self"),
    Seam(f"{_STATS}.SchedulerReqTimeStats.observe_storage_prefetch_ready", "hooked", "moments", "self, ready"),
    Seam(f"{_STATS}.SchedulerReqTimeStats.observe_storage_staging_ready", "hooked", "moments", "self, ready"),
    Seam(f"{_SCHEDULER}.get_output_streamer_class", "overridden", "scheduler", "self"),
    Seam(f"{_SCHEDULER}.send_abort_output", "overridden", "scheduler", "self, abort_req, req"),
    Seam(_STREAMER, "overridden", "output", None),
    Seam(f"{_STREAMER}.should_build_additional_customized_info", "overridden", "output", "self"),
    Seam(f"{_STREAMER}.build_additional_customized_info", "overridden", "output", "self, reqs"),
    Seam(
        f"{_MANAGER}.update_request_meta_info",
        *("hooked", "answering", "self, meta_info, state, customized_info, index, finish_reason"),
    ),
    Seam(f"{_MANAGER}._stream_one_response", "hooked", "answering", "self, obj, state, request="),
    Seam(f"{_MANAGER}.convert_to_span_attrs", "hooked", "answering", "self, state, recv_obj, i"),
)
"""Names that receipts need."""

SEAMS: tuple[Seam, ...] = (
    Seam("server_args.ServerArgs.add_cli_args", "hooked", "plugin", "parser"),
    Seam("server_args.ServerArgs.from_cli_args", "hooked", "plugin", "args"),
    Seam("server_args.ServerArgs.resolve_once", "hooked", "plugin", "self"),
    Seam("sampling.sampling_params.SamplingParams.verify", "hooked", "fatal", "self, vocab_size"),
    Seam(
        "managers.tokenizer_manager.TokenizerManager._validate_one_request",
        *("hooked", "prompts", "self, obj, input_ids"),
    ),
    Seam("managers.embed_types.PositionalEmbeds", "used", "fatal", None),
    Seam("sampling.custom_logit_processor.CustomLogitProcessor.from_str", "used", "fatal", "json_str"),
    Seam(f"{_MANAGER}.start_expert_distribution_record", "hooked", "fatal", "self"),
    Seam(f"{_MANAGER}.stop_expert_distribution_record", "hooked", "fatal", "self"),
    Seam(f"{_MANAGER}.dump_expert_distribution_record", "hooked", "fatal", "self"),
    Seam(f"{_MANAGER}.release_memory_occupation", "hooked", "control", "self, obj, request="),
    Seam(f"{_MANAGER}.resume_memory_occupation", "hooked", "control", "self, obj, request="),
    Seam(f"{_MANAGER}._execute_profile", "hooked", "control", "self, req"),
    Seam(f"{_UPDATER}.release_memory_occupation", "hooked", "control", "self, recv_req"),
    Seam(f"{_UPDATER}.resume_memory_occupation", "hooked", "control", "self, recv_req"),
    Seam(f"{_PROFILER}._profile", "hooked", "control", "self, recv_req"),
    Seam(f"{_PROFILER}._start_profile", "set", "control", "self, stage="),
    Seam(f"{_PROFILER}._stop_profile", "set", "control", "self, stage="),
    Seam(f"{_PROFILER}._profile_batch_predicate", "set", "control", "self, batch"),
    Seam(f"{_PROFILER}.[profile_in_progress]", "used", "control", None),
    Seam(f"{_PROFILER}.[profiler_decode_ct]", "used", "control", None),
    Seam("entrypoints.http_server.app", "used", "http_app, receipt_routes", None),
    Seam("entrypoints.warmup.warmup", "used", "profile", "name"),
    Seam(_SCHEDULER, "replaced", "plugin", "server_args, port_args"),
    Seam(f"{_SCHEDULER}.get_new_batch_prefill", "overridden", "scheduler", "self, running_batch"),
    Seam(f"{_SCHEDULER}.get_prefill_adder_class", "overridden", "scheduler", "self"),
    Seam(f"{_SCHEDULER}.ingest_requests", "overridden", "scheduler", "self, stop_at_pause="),
    Seam(f"{_SCHEDULER}.process_input_requests", "overridden", "scheduler", "self, recv_reqs"),
    Seam(f"{_SCHEDULER}.process_prefill_chunk", "overridden", "scheduler", "self, last_batch, running_batch"),
    Seam(f"{_SCHEDULER}._collect_inflight_batches", "overridden", "scheduler", "self"),
    Seam(f"{_SCHEDULER}.can_schedule_lora_req", "overridden", "scheduler", "self, req, running_loras"),
    Seam(f"{_SCHEDULER}.is_fully_idle", "overridden", "scheduler", "self, for_health_check=, ignore_waiting="),
    Seam(f"{_SCHEDULER}.pause_generation", "overridden", "scheduler", "self, recv_req"),
    Seam(f"{_SCHEDULER}._add_request_to_queue", "overridden", "scheduler", "self, req, is_retracted="),
    Seam(f"{_SCHEDULER}.abort_request", "overridden", "scheduler", "self, recv_req"),
    Seam(f"{_SCHEDULER}.process_pending_chunked_abort", "overridden", "scheduler", "self"),
    Seam(f"{_SCHEDULER}.run_batch", "overridden", "scheduler", "self, batch, pp_proxy_tensors="),
    Seam(f"{_SCHEDULER}.maybe_send_cached_prefix_chunk", "overridden", "compat", "self, req, allow_send="),
    Seam(f"{_SCHEDULER}.process_batch_result", "overridden", "scheduler", "self, batch, result"),
    Seam(f"{_SCHEDULER}.on_idle", "overridden", "scheduler", "self"),
    Seam(f"{_SCHEDULER}.get_internal_state", "overridden", "scheduler", "self, recv_req"),
    *_RECEIPTS,
    Seam(f"{_SCHEDULER}.[load_inquirer]", "set", "builder", None),
    Seam(f"{_SCHEDULER}.[invariant_checker]", "set", "colocated", None),
    Seam(f"{_SCHEDULER}.[request_receiver]", "set", "whole_view", None),
    Seam(
        "lora.lora_drainer.LoRADrainer.update_draining_state", "set", "whole_view", "self, waiting_queue, running_reqs"
    ),
    Seam(
        "managers.schedule_policy.SchedulePolicy._touch_waiting_prefixes",
        "set",
        "whole_view",
        "self, policy, waiting_queue",
    ),
    Seam(f"{_SCHEDULER}.[_sched_idled]", "used", "pauses", None),
    Seam(f"{_SCHEDULER}.[cur_batch_for_debug]", "used", "scheduler", None),
    Seam(f"{_SCHEDULER}.[total_prefill_busy_us]", "set", "counters", None),
    Seam(f"{_REPORTER}.[num_generated_tokens]", "used", "counters", None),
    Seam(f"{_REPORTER}.[current_scheduler_metrics_enabled]", "used", "counters", None),
    Seam("mem_cache.base_prefix_cache.BasePrefixCache.check_hicache_events", "used", "pauses", "self"),
    Seam(
        f"{_SCHEDULER}.get_num_allocatable_reqs",
        *("set", "colocated"),
        "self, running_bs, beam_width=, running_batch=, num_held_rows=",
    ),
    Seam("managers.schedule_batch.ScheduleBatch.forward_iter", "used", "core", None),
    Seam(_PENALTIES, "hooked", "penalties", "self"),
    Seam("session.session_controller.SessionController._close", "hooked", "sessions", "self, session_id"),
    Seam(
        "session.session_controller.Session.create_req",
        *("hooked", "sessions", "self, req, tokenizer, vocab_size, eos_token_ids=, disagg_mode=, req_factory="),
    ),
    Seam("session.streaming_session.StreamingSession.[slots]", "used", "sessions", None),
    Seam(
        "sampling.penaltylib.orchestrator._BatchedPenalizer.cumulate_output_tokens",
        *("used", "penalties", "self, output_ids"),
    ),
    Seam(_PENALTIES, "followed", "penalties", "dce2467c859a"),
    Seam(f"{_SCHEDULER}.get_next_batch_to_run", "followed", "colocated", "34f30fd4dfb1"),
    Seam(f"{_SCHEDULER}.[is_mixed_chunk]", "set", "builder", None),
    Seam("constrained.grammar_manager.GrammarManager.[grammar_queue]", "set", "builder", None),
    Seam("constrained.grammar_manager.GrammarManager.[SGLANG_GRAMMAR_POLL_INTERVAL]", "set", "builder", None),
    Seam("constrained.grammar_manager.GrammarManager.has_waiting_grammars", "used", "builder", "self"),
    Seam("constrained.grammar_manager.GrammarManager.get_ready_grammar_requests", "used", "builder", "self"),
    Seam(f"{_SCHEDULER}._get_new_batch_prefill_raw", "followed", "builder", "09e8cf03a4d0"),
    Seam("managers.schedule_batch.ScheduleBatch.decoding_reqs", "used", "core", None),
    Seam(f"{_SCHEDULER}.update_running_batch", "followed", "colocated", "6962823239da"),
    Seam(f"{_SCHEDULER}.event_loop_normal", "followed", "colocated", "c328a45b821f"),
    Seam(f"{_SCHEDULER}.event_loop_overlap", "followed", "colocated", "c093eb14e50c"),
    Seam("managers.schedule_batch.Req.[discard_output_reason]", "used", "colocated", None),
    Seam("mem_cache.prefill_budget.SWAPrefillBudget.available_chunk_tokens", "used", "adder", "self, chunk_limit"),
    Seam("managers.schedule_batch.FINISH_ABORT", "used", "colocated", None),
    Seam("model_executor.model_runner.ModelRunnerOutput", "used", "abandoned", None),
    Seam("layers.logits_processor.LogitsProcessorOutput", "used", "abandoned", None),
    Seam("model_executor.forward_batch_info.ForwardBatch.contains_mm_inputs", "used", "abandoned", "self"),
    Seam("managers.schedule_batch.retract_all", "used", "colocated", None),
    Seam(_ADDER, "overridden", "adder", None),
    Seam(f"{_ADDER}.add_chunked_req", "overridden", "adder", "self, req"),
    Seam(f"{_ADDER}.add_one_req", "overridden", "adder", "self, req, has_chunked_req, truncation_align_size"),
    Seam(
        f"{_ADDER}._select_prefill_admission",
        *("overridden", "adder"),
        "self, req, *, total_tokens, host_hit_length, swa_host_hit_length, truncation_align_size, has_chunked_req=",
    ),
    Seam(f"{_ADDER}.add_one_req_ignore_eos", "overridden", "adder", "self, req"),
    Seam(f"{_ADDER}.preempt_to_schedule", "overridden", "adder", "self, req"),
    Seam(f"{_SCHEDULER}.ingest_requests", "followed", "pauses", "77f9e386bae1"),
    Seam(f"{_LOOPS}.get_next_disagg_prefill_batch_to_run", "followed", "pauses", "97d4e18208d6"),
    Seam(f"{_STATS}.set_schedule_time_batch", "used", "pauses", "batch"),
    Seam(f"{_LOOPS}.event_loop_normal_disagg_prefill", "followed", "pauses", "b4315a1aa380"),
    Seam(f"{_LOOPS}.event_loop_overlap_disagg_prefill", "followed", "pauses", "702058c506cb 5cb825de3439"),
    Seam(f"{_PIPELINE}.event_loop_pp_disagg_prefill", "followed", "ranks", "c38a8205cc5d ef2032fadedd"),
    Seam(
        "model_executor.model_runner.ModelRunner.forward",
        *("set", "slices"),
        "self, forward_batch, skip_attn_backend_init=, pp_proxy_tensors=, reinit_attn_backend=, split_forward_count=",
    ),
    Seam("model_executor.runner.eager_runner.EagerRunner.load_batch", "set", "slices", None),
    Seam("layers.attention.vision.VisionAttention", "used", "layers", None),
    Seam("server_args.ServerArgs.mm_enable_dp_encoder", "used", "no_slices", None),
    Seam("lora.lora_manager.LoRAManager.fetch_new_loras", "set", "pauses", "self, new_loras, running_loras="),
    Seam("lora.lora_manager.LoRAManager.prepare_lora_batch", "used", "put_back", "self, forward_batch"),
    Seam("model_executor.forward_context.set_forward_context", "used", "put_back", "ctx"),
    Seam("runtime_context.ForwardFlags._DEFAULTS", "used", "put_back", None),
    Seam("managers.cache_controller.LayerLoadingEvent.wait", "used", "host_loads", "self, layer_index"),
    Seam("utils.device_timer.DeviceTimer.wrap", "followed", "put_back", "64c02ec317ff"),
    Seam("layers.dp_attention.set_dp_buffer_len_from_batch", "used", "put_back", "forward_batch"),
    Seam("layers.dp_attention.set_is_extend_in_batch", "used", "put_back", "is_extend_in_batch"),
    Seam(
        "batch_overlap.two_batch_overlap.model_forward_stages",
        *("used", "slices", "layers, enable_tbo, positions, forward_batch, hidden_states, zero_allocator="),
    ),
    Seam("eplb.expert_distribution.get_global_expert_distribution_recorder", "used", "expert_counts", ""),
    Seam(f"{_RECORDER}.[_record_current_pass]", "used", "expert_counts", None),
    Seam(f"{_RECORDER}.[_single_pass_gatherers]", "used", "expert_counts", None),
    Seam(f"{_RECORDER}._on_forward_pass_start", "followed", "expert_counts", "39f6bfdb53d2"),
    Seam("utils.common.Withable", "used", "expert_counts", ""),
    Seam("model_executor.model_runner.ModelRunner.[eplb_manager]", "set", "expert_counts", None),
    Seam(
        "model_executor.model_runner.ModelRunner.init_cuda_graphs",
        *("hooked", "graphs", "self, capture_decode_cuda_graph="),
    ),
    Seam("model_executor.model_runner.ModelRunner.[prefill_cuda_graph_runner]", "set", "graphs", None),
    Seam(
        "model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph",
        *("used", "graphs", "*, model_runner, eager_runner, force_for_draft_worker="),
    ),
    Seam(f"{_KV}.__init__", "hooked", "transfers", "self, args, disaggregation_mode, server_args, is_mla_backend="),
    Seam(f"{_KV}.[transfer_infos]", "set", "transfers", None),
    Seam(f"{_KV}.check_status", "hooked", "transfers", "self, bootstrap_room"),
    Seam(f"{_KV}.update_status", "hooked", "transfers", "self, bootstrap_room, status"),
)
