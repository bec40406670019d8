"""The arguments of FSDP2's fully_shard and accelerate's FSDP configuration become plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.paths import ROOT

from thinwire.convert import Conversion, from_accelerate, from_fsdp2
from thinwire.convert.plain_yaml import read_yaml
from thinwire.errors import SpecError
from thinwire.spec import Factor, Plan

RANKS = Factor(local=4, nodes=2)


def fsdp2(arguments: str) -> Conversion:
    return from_fsdp2(f"fully_shard(model, {arguments})", RANKS)


def preset(name: str, **keys: Any) -> str:
    return Plan.preset(name, nodes=2, local=4, **{"compute_dtype": "float32", **keys}).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", preset("zero3")),
        ("reshard_after_forward=True", preset("zero3")),
        ("reshard_after_forward=False", preset("zero2")),
        ("reshard_after_forward=4", preset("hpz")),
        ("reshard_after_forward=2", preset("hpz", group="2x1")),
        ('mesh=init_device_mesh("cuda", (2, 4))', preset("hsdp")),
        ("mesh=init_device_mesh('cpu', mesh_shape=(8,))", preset("zero3")),
        ("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)", preset("zero3", compute_dtype="bfloat16")),
        (
            "mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
            preset("zero3", compute_dtype="bfloat16", reduce_dtype="float32"),
        ),
        (
            "mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
            preset("zero3", compute_dtype="bfloat16", reduce_dtype="float32"),
        ),
        ("offload_policy=OffloadPolicy()", preset("zero3")),
        (
            "offload_policy=CPUOffloadPolicy()",
            preset("zero3", residence={"optimizer": "host-stream", "gradients": "host", "params": "host"}),
        ),
    ],
)
def test_a_call_becomes_a_plan(arguments: str, expected: str) -> None:
    assert fsdp2(arguments).plan().fingerprint() == expected


def test_a_table_is_the_same_as_a_call() -> None:
    table = {"mesh": [2, 4], "mp_policy": {"param_dtype": "bfloat16"}, "reshard_after_forward": True}
    call = 'mesh=init_device_mesh("cuda", (2, 4)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)'
    assert from_fsdp2(table, RANKS).plan() == fsdp2(call).plan()


@pytest.mark.parametrize("mesh", [[], [2, 0], [2, "x"], [2, 2, 2], "2x4"])
def test_an_invalid_mesh_is_refused_beside_other_arguments(mesh: Any) -> None:
    conversion = from_fsdp2({"mesh": mesh, "reshard_after_forward": True}, RANKS)
    assert [row.key for row in conversion.refusals] == ["mesh"]


@pytest.mark.parametrize("turned", [False, True])
def test_hsdp_without_resharding_keeps_parameters_whole(turned: bool) -> None:
    arguments = ['mesh=init_device_mesh("cuda", (2, 4))', "reshard_after_forward=False"]
    plan = fsdp2(", ".join(reversed(arguments) if turned else arguments)).plan()
    assert (str(plan.params), str(plan.grads), str(plan.optimizer)) == ("1x1", "4x1", "4x1")


@pytest.mark.parametrize(
    ("arguments", "key", "text"),
    [
        ("reshard_after_forward=3", "reshard_after_forward", "a divisor of the 8 ranks"),
        ('mesh=init_device_mesh("cuda", (4, 4))', "mesh", "makes 16 ranks"),
        ("reshard=True", "reshard", "or reshard_after_forward?"),
        ("mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False)", "mp_policy.cast_forward_inputs", "leave it out"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: str, key: str, text: str) -> None:
    (row,) = fsdp2(arguments).refusals
    assert row.key == key
    assert text in row.judgement.text


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("fully_shard(model, reshard_after_forward=", "is not Python"),
        ("FSDP(model)", "is no call of fully_shard"),
        ("fully_shard(model, reshard_after_forward=size)", "is no constant"),
        ("fully_shard(model, **options)", "and keywords"),
        ("fully_shard(model, mesh=init_device_mesh('cuda', sizes))", "constant sizes"),
        (
            "fully_shard(model, mesh=init_device_mesh('cuda', (2, 4), names))",
            "takes device_type, mesh_shape by position",
        ),
        ("fully_shard(model, mesh=[8], mesh=[2, 4])", "given an argument more than once"),
        ("fully_shard(model, mesh={[]: 1})", "is no constant"),
        ("fully_shard(model, ignored_params=set())", "is no constant"),
        ("fully_shard(model, mesh=init_device_mesh('cuda', {[]: 1}))", "constant sizes"),
        (f"fully_shard(model, mesh={'-' * 90_000}1)", "nested too deeply"),
        ("fully_shard(model, mp_policy=MixedPrecisionPolicy(*dtypes))", "is no constant"),
        ("fully_shard(model, reshard_after_forward=__import__('os').getpid())", "is no constant"),
    ],
)
def test_text_that_is_no_call_with_constants_is_refused(call: str, text: str) -> None:
    with pytest.raises(SpecError, match="--fsdp2") as error:
        from_fsdp2(call, RANKS)
    assert text in str(error.value)


ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def accelerate(**fsdp: Any) -> Conversion:
    return from_accelerate({**ACCELERATE, "fsdp_config": {f"fsdp_{key}": value for key, value in fsdp.items()}}, RANKS)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"version": 2, "reshard_after_forward": True}, "zero3"),
        ({"version": 2, "reshard_after_forward": False}, "zero2"),
        ({"version": 1, "sharding_strategy": "FULL_SHARD"}, "zero3"),
        ({"version": 1, "reshard_after_forward": "SHARD_GRAD_OP"}, "zero2"),
        ({"version": 1, "sharding_strategy": "NO_SHARD"}, "ddp"),
        ({"version": 1, "sharding_strategy": 4}, "hsdp"),
    ],
)
def test_accelerate_s_file_becomes_a_plan(keys: dict[str, Any], name: str) -> None:
    assert accelerate(**keys).plan().fingerprint() == preset(name, compute_dtype="bfloat16")


def test_keys_of_accelerate_that_contradict_each_other_are_refused() -> None:
    (row,) = accelerate(sharding_strategy="SHARD_GRAD_OP", reshard_after_forward=True).refusals
    assert row.key == "fsdp_config.fsdp_reshard_after_forward"
    assert row.judgement.text == "fsdp_config.fsdp_sharding_strategy sets params = 1x1; leave one of the two out"
    assert accelerate(sharding_strategy="SHARD_GRAD_OP", reshard_after_forward=False).refusals == ()


@pytest.mark.parametrize("value", [[], {"a": 1}, "SHARDED", 6])
def test_a_strategy_that_accelerate_does_not_know_is_refused(value: Any) -> None:
    (row,) = accelerate(sharding_strategy=value).refusals
    assert "expected one of FULL_SHARD" in row.judgement.text


def test_accelerate_s_ddp() -> None:
    table = {**ACCELERATE, "distributed_type": "MULTI_GPU", "mixed_precision": "no"}
    assert from_accelerate(table, RANKS).plan().fingerprint() == preset("ddp")
    # Gradients of autocast are fp32; and what is left of another kind has no effect.
    for left in ({}, {"fsdp_config": {}}, {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}):
        plan = from_accelerate({**table, "mixed_precision": "bf16", **left}, RANKS).plan()
        assert plan.fingerprint() == preset("ddp", compute_dtype="bfloat16", reduce_dtype="float32")


def test_accelerate_s_recomputation_and_offloading() -> None:
    assert accelerate(activation_checkpointing=True).plan().recompute
    assert accelerate(offload_params=True).plan().residence.optimizer == "host-stream"


def test_every_key_that_accelerate_s_questionnaire_writes_has_a_rule() -> None:
    pytest.importorskip("accelerate")
    import re

    import accelerate as package
    from accelerate.commands.config.config_args import ClusterConfig

    from thinwire.convert.accelerate import _RULES

    wizard = Path(package.__file__).parent / "commands/config/cluster.py"
    keys = set(re.findall(r'fsdp_config\["(fsdp_\w+)"\]', wizard.read_text()))
    rules = _RULES["fsdp_config"]
    assert len(keys) > 10
    assert not callable(rules)
    assert keys <= set(rules)
    assert set(ClusterConfig.__dataclass_fields__) <= set(_RULES)


def test_deepspeed_inside_accelerate_s_file_is_refused_with_what_to_convert() -> None:
    for table, remedy in (
        ({"deepspeed_config_file": "ds.json"}, "convert ds.json"),
        ({"zero_stage": 3}, "write it to a JSON"),
    ):
        rows = from_accelerate(
            {**ACCELERATE, "distributed_type": "DEEPSPEED", "deepspeed_config": table}, RANKS
        ).refusals
        assert remedy in {row.key: row.judgement.text for row in rows}["deepspeed_config"]


def test_what_older_versions_of_accelerate_wrote_beside_is_off() -> None:
    off = {"command_file": None, "dynamo_backend": "NO", "megatron_lm_config": {}, "tpu_name": None, "fp8_config": {}}
    assert not from_accelerate({**ACCELERATE, **off}, RANKS).refusals


def test_a_wrong_number_of_processes_is_refused() -> None:
    (row,) = from_accelerate({**ACCELERATE, "num_processes": 16}, RANKS).refusals
    assert (row.key, row.judgement.text) == ("num_processes", "--nodes and --nproc make 8 ranks")


YAML = """\
---
# written by accelerate config
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config: {}
fsdp_config:
  fsdp_min_num_params: 100000000
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Other
main_process_ip: 10.0.0.1
share: 0.5
small: 1.0e-5
name: "a b"  # a remark
text: 'it''s'
tpu_env: []
nothing: null
"""


def test_plain_yaml_reads_what_a_whole_library_reads() -> None:
    assert read_yaml(YAML, "accelerate.yaml") == yaml.safe_load(YAML)


def test_the_example_is_read_as_a_whole_library_reads_it() -> None:
    text = (ROOT / "examples/convert/accelerate.yaml").read_text()
    assert read_yaml(text, "accelerate.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n- b", "is not key: value"),
        ("a:\n  b: 1\n c: 2", "indented like no line"),
        ("a: 1\na: 2", "given more than once"),
        ("a: !!python/object/apply:os.system ['true']", "no plain value"),
        ("a: &anchor 1", "no plain value"),
        ("a: [1, 2]", "no plain value"),
        (r'a: "\x"', "no plain value"),
        ('a: "a"+"b"', "no plain value"),
        ('a: "b" "c"', "no plain value"),
        ("a: 'b' 'c'", "no plain value"),
        (f"a: {'9' * 5000}", "no plain value"),
    ],
)
def test_other_yaml_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_yaml(text, "file.yaml")
