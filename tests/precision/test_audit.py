import torch
from precision_models import BUILT_IN, CPU, batch, build, loss_fn, train
from torch import nn

from harness.precision.execution import applied


def test_fp32_and_its_twin_audit_alike_and_every_other_policy_differs():
    audits = {name: train(policy, steps=1)[2] for name, policy in BUILT_IN.items()}
    assert audits["fp32_twin"] == audits["fp32"]
    for name in set(audits) - {"fp32", "fp32_twin"}:
        assert audits[name] != audits["fp32"], name
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
    for name, policy in BUILT_IN.items():
        audited = train(policy, steps=2)[0]  # audits its first step
        model, losses = build(), []
        with applied(
            policy, model, device=CPU, trace_forward=lambda m=model: loss_fn(m, batch())
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
