"""Names of the keys of DeepSpeed 0.19.8's configuration, and of those that 0.19 removed, by section.

``tests/convert/test_deepspeed.py`` compares them with an installed DeepSpeed, where there is one.
"""

TOP = [
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "bfloat16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning",
    "data_efficiency", "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather",
    "disable_python_gc", "dump_state", "eigenvalue", "elasticity", "expert_parallel", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_allreduce_op", "gradient_clipping", "gradient_predivide_factor",
    "graph_harvesting", "hybrid_engine", "log_level", "managed_gradient_accumulation", "memory_breakdown", "nebula",
    "optimizer", "pipeline", "prescale_gradients", "progressive_layer_drop", "quantize_training", "scheduler",
    "seq_parallel_communication_data_type", "sparse_attention", "sparse_gradients", "steps_per_print",
    "tensor_parallel", "tensorboard", "timers", "torch_autocast", "train_batch_size", "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb", "weight_quantization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
]  # fmt: skip

SECTIONS = {
    "zero_optimization": [
        "allgather_bucket_size", "allgather_partitions", "compute_grad_norm", "contiguous_gradients", "cpu_offload",
        "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint", "enable_sanity_checks",
        "ignore_unused_parameters", "leaf_module", "legacy_stage1", "load_from_fp32_weights",
        "log_trace_cache_warnings", "memory_efficient_linear", "offload_optimizer", "offload_param", "overlap_comm",
        "override_module_apply", "parameter_alignment", "pipeline_loading_checkpoint", "reduce_bucket_size",
        "reduce_scatter", "round_robin_gradients", "save_muon_momentum_buffer_in_memory", "stage",
        "stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_model_persistence_threshold", "stage3_module_granularity_threshold",
        "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params",
        "sub_group_size", "use_multi_rank_bucket_allreduce", "zenflow", "zero_hpz_partition_size",
        "zero_quantized_gradients", "zero_quantized_nontrainable_weights", "zero_quantized_weights",
    ],
    "fp16": [
        "auto_cast", "consecutive_hysteresis", "enabled", "fp16_master_weights_and_grads", "hysteresis",
        "initial_scale_power", "loss_scale", "loss_scale_window", "min_loss_scale",
    ],
    "bf16": [
        "bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow", "enabled",
        "immediate_grad_update",
    ],
    "compile": [
        "autoep_non_moe", "debug_log", "deepcompile", "double_buffer", "free_activation", "free_activation_threshold",
        "keep_all_input_tensors", "keep_int_input_tensors", "offload_activation", "offload_activation_pin_memory",
        "offload_opt_states", "offload_parameters", "passes", "symmetric_memory", "sync_after_allgather",
        "sync_after_reduce", "sync_before_allgather", "sync_before_reduce",
    ],
    "tensor_parallel": [
        "autotp_size", "dtype", "injection_policy_tuple", "keep_module_on_host", "kernel_inject", "partition_config",
        "preset_model", "tp", "tp_overlap_comm", "vocab_parallel_ce_backend", "vocab_parallel_lm_head",
    ],
    "tensorboard": ["enabled", "job_name", "output_path"],
    "torch_autocast": ["dtype", "enabled", "lower_precision_safe_modules"],
    "data_types": ["buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules", "param_dtype"],
    "activation_checkpointing": [
        "contiguous_memory_optimization", "cpu_checkpointing", "number_checkpoints", "partition_activations", "profile",
        "synchronize_checkpoint_boundary",
    ],
    "checkpoint": [
        "checkpoint_serialization", "load_universal", "parallel_write", "tag_validation", "use_node_local_storage",
        "writer",
    ],
    "pipeline": [
        "activation_checkpoint_interval", "grad_partitioned", "partition", "pipe_partitioned", "seed_layers", "stages",
    ],
    "optimizer": ["legacy_fusion", "params", "type"],
    "scheduler": ["params", "type"],
}  # fmt: skip

REMOVED = ["mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"]
"""Keys of ``zero_optimization`` that DeepSpeed 0.19 refuses."""
