"""Model files and chat template against the configuration, frozen parts and layers with adapters."""

from __future__ import annotations

from math import prod

from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.preflight.checks import find_mismatches
from mobula.deploy.preflight.findings import Severity
from mobula.deploy.preflight.loaded import LoadedModel
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured
from mobula.learner.policies.families.registry import frozen_prefixes
from mobula.learner.policies.lora import adapted_modules
from mobula.learner.policies.shapes import layer_kind

CHECKPOINT, FROZEN, ADAPTERS = "model_and_template", "frozen_parts", "adapter_targets"
SMALL = 0.5  # of the weights


def check_checkpoint(material: Material) -> RunFinding:
    """Runs the preflight of model files, tokenizer and chat template."""
    if material.model_problem:
        numbers = {"num_problems": 1.0}
        return RunFinding(CHECKPOINT, RunVerdict.FAULT, "1 problem refuses the run", numbers, material.model_problem)
    if material.model is None:
        return not_measured(CHECKPOINT, "the files of policy.model are not on this machine")
    findings = list(find_mismatches(material.config, material.model))
    numbers = {"num_problems": float(len(findings))}
    measured = f"{len(findings)} mismatches of model files, tokenizer, chat template and configuration"
    if not findings:
        return RunFinding(CHECKPOINT, RunVerdict.OK, measured, numbers)
    refuses = any(finding.severity is Severity.REFUSE for finding in findings)
    evidence = tuple(Evidence(str(finding)) for finding in findings)
    verdict = RunVerdict.FAULT if refuses else RunVerdict.WARNING
    return RunFinding(CHECKPOINT, verdict, measured, numbers, findings[0].action, evidence)


def check_frozen(material: Material) -> RunFinding:
    """Share of the weights that `policy.freeze` leaves to train."""
    config, sizes = material.config.policy, _sizes(_model(material))
    frozen = () if material.config.sampler.is_flow else frozen_prefixes(config)
    total = sum(sizes.values())
    trained = sum(size for name, size in sizes.items() if not (frozen and name.startswith(frozen)))
    numbers = {"trained_fraction": trained / total, "num_trained": float(trained)}
    measured = f"policy.freeze={list(config.freeze)} leaves {trained / total:.1%} of {total:,} weights to train"
    if not config.freeze:
        return RunFinding(FROZEN, RunVerdict.OK, measured, numbers)
    is_suspect = trained / total < SMALL and material.run is not None and not material.is_learning
    action = "take the part that has to learn out of policy.freeze (language: the decoder)"
    return RunFinding(FROZEN, RunVerdict.WARNING if is_suspect else RunVerdict.NOTICE, measured, numbers, action)


def check_adapters(material: Material) -> RunFinding:
    """Layers that each entry of `policy.lora.target_modules` matches."""
    policy = material.config.policy
    if not policy.lora.is_on:
        return not_measured(ADAPTERS, "policy.lora.rank=0: the weights are trained, no adapters")
    modules = adapted_modules(_model(material).checkpoint, policy)
    kinds = {layer_kind(module) for module in modules}
    names = [target for target in policy.lora.target_modules if target not in ("language", "vision", "connector")]
    unbound = [target for target in names if target not in kinds]
    num = sum(policy.lora.rank * sum(shape) for shape in modules.values())
    numbers = {"num_layers": float(len(modules)), "num_trained": float(num), "num_unbound": float(len(unbound))}
    measured = f"{len(modules)} layers have adapters of rank {policy.lora.rank}, {num:,} numbers to train"
    if not unbound:
        return RunFinding(ADAPTERS, RunVerdict.OK, measured, numbers)
    action = f"policy.lora.target_modules: {', '.join(unbound)} matches no layer; there are {', '.join(sorted(kinds))}"
    return RunFinding(ADAPTERS, RunVerdict.WARNING, measured, numbers, action)


def _sizes(model: LoadedModel) -> dict[str, int]:
    return {spec.name: prod(spec.shape) for spec in model.checkpoint.tensors}


def _model(material: Material) -> LoadedModel:
    assert material.model is not None, "the registry asks for a model first"
    return material.model
