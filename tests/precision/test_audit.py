from contextlib import nullcontext

import torch
from precision_models import BUILT_IN, CPU, batch, build, loss_fn, policy, train
from torch import nn

from harness.precision.audit import audited_step
from harness.precision.execution import applied
from harness.precision.kernels.registry import Override, registered


def test_fp32_and_its_controls_audit_alike_and_every_other_policy_differs():
    audits = {name: train(chosen, steps=1)[2] for name, chosen in BUILT_IN.items()}
    for name in set(audits) - {"fp32"}:
        assert (audits[name] == audits["fp32"]) == BUILT_IN[name].is_control, name
    assert audits["bf16_fallback"] != audits["bf16"]


def test_every_call_counts_once():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    for name, fmt in [("fp32", "fp32"), ("tf32", "tf32"), ("bf16", "bf16"), ("fp16", "fp16")]:
        with applied(BUILT_IN[name], model, device=CPU) as execution:
            with execution.audit() as audit, execution.forward():
                model(x)
        assert audit["addmm"] == {fmt: 2}
        assert audit["native_layer_norm"] == {"fp32": 1}


def test_only_the_forward_pass_counts():
    model, data = build(), batch()
    audits = []
    for whole_step in (False, True):
        with applied(BUILT_IN["tf32"], model, device=CPU) as execution:
            with execution.audit() as audit:
                with execution.forward():
                    loss = loss_fn(model, data)
                if whole_step:
                    loss.backward()
        audits.append(audit)
    assert audits[0] == audits[1]
    assert "tf32" in audits[1]["addmm"]


def test_auditing_changes_no_value():
    for name, chosen in BUILT_IN.items():
        audited = train(chosen, steps=2)[0]  # audits its first step
        model, losses = build(), []
        with applied(
            chosen, model, device=CPU, trace_forward=lambda m=model: loss_fn(m, batch())
        ) as e:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                optimizer.zero_grad()
                with e.forward():
                    loss = loss_fn(model, batch())
                loss.backward()
                optimizer.step()
                losses.append(loss.detach().float().item())
        assert losses == audited, name


def test_tf32_is_not_reported_without_a_product():
    model, x = nn.LayerNorm(4), torch.randn(2, 4)
    with applied(BUILT_IN["tf32"], model, device=CPU) as execution:
        with execution.audit() as audit, execution.forward():
            model(x)
    assert audit == {"native_layer_norm": {"fp32": 1}}
    assert execution.kind == "native"


def audit_step(model, forward, with_policy, **applied_with):
    with applied(with_policy, model, device=CPU, **applied_with) as execution:
        with audited_step(execution, model) as audit:
            with execution.forward():
                loss = forward()
            loss.backward()
        return audit.result()


def formats(result, **where):
    """Return {format: calls} over the rows with these values."""
    found = {}
    for row in result["rows"]:
        if all(row[key] == value for key, value in where.items()):
            found[row["format"]] = found.get(row["format"], 0) + row["calls"]
    return found


def step_of(name_or_policy, model=None):
    model, data = build() if model is None else model, batch()
    chosen = BUILT_IN.get(name_or_policy, name_or_policy)
    trace = lambda: loss_fn(model, data)  # noqa: E731
    return audit_step(model, trace, chosen, trace_forward=trace)


PRODUCTS = ("matmul", "convolution", "attention")


class TestOneAuditedStep:
    """The whole step: by module and direction."""

    def test_products_run_in_the_policys_format_in_both_directions(self):
        for name in ("fp32", "bf16", "fp16", "tf32"):
            result = step_of(name)
            for family in PRODUCTS:
                for direction in ("forward", "backward"):
                    found = formats(result, family=family, direction=direction)
                    unfused = name == "tf32" and family == "attention"
                    assert set(found) == (set() if unfused else {name}), (name, family, direction)
            assert result["low_precision_flop_share"] == (0.0 if name == "fp32" else 1.0)

    def test_the_forward_counts_are_those_of_the_record(self):
        for name, chosen in BUILT_IN.items():
            model, data = build(), batch()
            with applied(
                chosen, model, device=CPU, trace_forward=lambda m=model, d=data: loss_fn(m, d)
            ) as execution:
                with execution.audit() as counts, execution.forward():
                    loss_fn(model, data)
                with audited_step(execution, model) as audit, execution.forward():
                    loss_fn(model, data)
            assert audit.forward_formats == counts, name

    def test_a_fallback_module_really_runs_in_fp32(self):
        kept = policy("bf16", fp32_modules=["attn.qkv", "norm"])
        result = step_of(kept)
        for direction in ("forward", "backward"):
            for module, fmt in (("attn.qkv", "fp32"), ("attn.out", "bf16")):
                found = formats(result, module=module, family="matmul", direction=direction)
                assert set(found) == {fmt}, (module, direction)
        assert 0 < result["low_precision_flop_share"] < 1

    def test_a_direction_of_its_own_is_seen(self):
        forward_only = step_of(policy("tf32", fp32_modules=["backward:head"]))
        assert set(formats(forward_only, module="head", family="matmul", direction="forward")) == {
            "tf32"
        }
        assert set(formats(forward_only, module="head", family="matmul", direction="backward")) == {
            "fp32"
        }

    def test_formats_that_no_tensor_has_are_named_per_direction(self):
        fp8 = policy("fp8_e4m3", gradient_format="fp8_e5m2")
        result = step_of(fp8)
        assert set(formats(result, family="matmul", direction="forward")) == {"fp8_e4m3"}
        assert set(formats(result, family="matmul", direction="backward")) == {"fp8_e5m2"}
        assert result["low_precision_flop_share"] == 1.0
        # The rounding itself is none of the model's ops.
        assert not formats(result, op="isnan")

    def test_a_policy_that_did_nothing_is_caught(self):
        """Planted: the autocast of the policy is switched off by the model itself."""

        class SwitchedOff(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = build()

            def forward(self, x):
                with torch.autocast("cpu", enabled=False):
                    return self.inner(x)

        result = step_of("bf16", SwitchedOff())
        assert result["low_precision_flop_share"] == 0.0
        assert result["casts"] == []

    def test_a_policy_that_did_something_else_is_caught(self):
        """Planted: a kernel that computes one op of one policy in another format."""

        def in_fp16(*args):
            with torch.autocast("cpu", enabled=False):
                return torch.ops.aten.linear.default(*[x.half() for x in args]).to(torch.bfloat16)

        override = Override(op="linear", kernel=in_fp16, key="AutocastCPU")
        model, data = build(), batch()
        with applied(BUILT_IN["bf16"], model, device=CPU) as execution, registered([override]):
            with audited_step(execution, model) as audit:
                with execution.forward():
                    loss = loss_fn(model, data)
                loss.backward()
        result = audit.result()
        assert set(formats(result, module="head", family="matmul")) == {"fp16"}
        assert set(formats(result, family="convolution")) == {"bf16"}

    def test_casts_are_counted_where_they_happen(self):
        model, x = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), torch.randn(7, 3)
        result = audit_step(model, lambda: model(x).sum(), BUILT_IN["bf16"])
        casts = {
            (c["module"], c["direction"], c["from"], c["to"]): (c["calls"], c["elements"])
            for c in result["casts"]
        }
        # Input, weight and bias of the linear layer; its output for the normalization.
        assert casts[("0", "forward", "fp32", "bf16")] == (3, 21 + 15 + 5)
        assert casts[("1", "forward", "bf16", "fp32")] == (1, 35)
        # The gradients of weight and bias (the input needs none), and of the cast output.
        assert casts[("0", "backward", "bf16", "fp32")] == (2, 15 + 5)
        assert casts[("1", "backward", "fp32", "bf16")] == (1, 35)
        assert sum(calls for calls, _ in casts.values()) == 7

    def test_it_changes_no_value(self):
        for name, chosen in BUILT_IN.items():
            gradients = []
            for audited in (False, True):
                model, data = build(), batch()
                with applied(
                    chosen, model, device=CPU, trace_forward=lambda m=model, d=data: loss_fn(m, d)
                ) as execution:
                    with audited_step(execution, model) if audited else nullcontext():
                        with execution.forward():
                            loss = loss_fn(model, data)
                        loss.backward()
                    gradients.append([p.grad.clone() for p in model.parameters()])
            for plain, seen in zip(*gradients, strict=True):
                assert torch.equal(plain, seen), name

    def test_nothing_waits_for_the_device(self):
        """The meta device holds no values: whoever reads one raises."""
        meta = torch.device("meta")
        model = nn.Sequential(nn.Linear(3, 5, device=meta), nn.LayerNorm(5, device=meta))
        x = torch.randn(7, 3, device=meta)
        with applied(BUILT_IN["fp32"], model, device=meta) as execution:
            with audited_step(execution, model) as audit:
                with execution.forward():
                    loss = model(x).sum()
                loss.backward()
        assert audit.forward_formats["addmm"] == {"fp32": 1}


class TestNonFinite:
    """Which op left the range of its format."""

    def test_an_overflow_is_named_where_it_happens_and_nowhere_after(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        with torch.no_grad():
            model[1].weight.fill_(3e4)
            model[0].weight.fill_(1.0)
        x = torch.ones(2, 4)
        result = audit_step(model, lambda: model(x).sum(), BUILT_IN["fp16"])
        assert result["nonfinite"][0] == {
            "module": "1",
            "op": "addmm",
            "direction": "forward",
            "format": "fp16",
        }
        assert "2" not in {found["module"] for found in result["nonfinite"]}
        assert audit_step(model, lambda: model(x).sum(), BUILT_IN["bf16"])["nonfinite"] == []

    def test_a_cast_may_overflow_too(self):
        model, x = nn.Linear(4, 4), torch.full((2, 4), 7e4)
        result = audit_step(model, lambda: model(x).sum(), BUILT_IN["fp16"])
        assert result["nonfinite"][0]["op"] == "_to_copy"

    def test_a_mask_of_minus_infinity_is_a_constant(self):
        class Masked(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(4, 4)

            def forward(self, x):
                scores = self.inner(x)
                mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
                added = torch.zeros_like(scores).masked_fill(mask, -torch.inf)
                return scores.masked_fill(mask, -torch.inf).softmax(-1) + (scores + added).softmax(
                    -1
                )

        model = Masked()
        for name in ("fp32", "bf16", "fp16"):
            result = audit_step(model, lambda: model(torch.randn(4, 4)).sum(), BUILT_IN[name])
            assert result["nonfinite"] == [], name

    def test_a_large_number_that_a_format_lacks_is_none(self):
        model = nn.Linear(4, 4)
        forward = lambda: (model(torch.randn(2, 4)) * -1e9).softmax(-1).sum()  # noqa: E731
        ops = [found["op"] for found in audit_step(model, forward, BUILT_IN["fp16"])["nonfinite"]]
        assert ops[0] == "mul"

    def test_an_in_place_op_is_judged_by_what_it_was_given(self):
        model = nn.Linear(4, 4)
        forward = lambda: model(torch.ones(2, 4)).mul_(1e9).float().sum()  # noqa: E731
        ops = {found["op"] for found in audit_step(model, forward, BUILT_IN["fp16"])["nonfinite"]}
        assert "mul_" in ops
