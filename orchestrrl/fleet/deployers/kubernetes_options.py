"""What a user says about engines on Kubernetes: `fleet.deployer.options`. Pure."""

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from orchestrrl.core.documents import Name, NonNegativeInt, PositiveFloat, PositiveInt, Section

Names = Annotated[tuple[Name, ...], Field(strict=False)]

# Set by us in every pod; a template that says otherwise would break what an engine is to us.
OURS = ("restartPolicy", "schedulingGates", "terminationGracePeriodSeconds")


class KubernetesOptions(Section):
    """Names and seconds are Kubernetes' own. What is not here can be said in `pod_template`."""

    image: Name  # with vLLM in it, and a shell
    namespace: Name = "default"
    # Names of nodes in the order of the fleet's GPUs, per_node each; none: Kubernetes chooses, and only counts matter.
    nodes: Names = ()
    kubeconfig: Name | None = None  # a file; None: the service account of the pod that the daemon runs in
    context: Name | None = None  # of the kubeconfig; None: its current one
    gpu_resource: Name = "nvidia.com/gpu"
    service_account: Name | None = None
    image_pull_secrets: Names = ()
    node_selector: dict[Name, str] = Field(default_factory=dict)
    tolerations: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    volumes: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()  # as in a pod's spec
    volume_mounts: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()  # of every container of ours
    environment_from: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()  # secrets, as in `envFrom`
    shm_size: Name | None = "8Gi"  # of /dev/shm, which vLLM's processes talk through; null: the node's default
    pod_template: dict[str, Any] = Field(default_factory=dict)  # `metadata` and `spec` of a pod, to which ours is added
    grace_s: PositiveInt = 10  # that a stopped engine has before it is killed
    schedule_within_s: PositiveFloat = 30.0  # that a pod may wait for room before its start is given up
    stop_within_s: PositiveFloat = 120.0  # beyond grace_s; then the outcome is unknown
    request_timeout_s: PositiveFloat = 10.0
    poll_s: PositiveFloat = 0.5
    log_lines: NonNegativeInt = 40  # of an engine that has ended, to be shown
    read_nodes: bool = True  # a right on the cluster; without it a lost node is noticed only once its pods are evicted

    @field_validator("context")
    @classmethod
    def _of_a_kubeconfig(cls, context: str | None, given: ValidationInfo) -> str | None:
        if context is not None and given.data.get("kubeconfig", "") is None:
            raise ValueError("needs options.kubeconfig")
        return context

    @field_validator("nodes")
    @classmethod
    def _different(cls, nodes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(nodes)) != len(nodes):
            raise ValueError("must differ")
        return nodes

    @field_validator("pod_template")
    @classmethod
    def _not_what_is_ours(cls, template: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(template) - {"metadata", "spec"})
        if unknown:
            raise ValueError(f"must have `metadata` and `spec` alone, not {', '.join(unknown)}")
        if not all(isinstance(part, dict) for part in template.values()):
            raise ValueError("must have objects as `metadata` and `spec`")
        taken = [name for name in OURS if name in template.get("spec", {})]
        if taken:
            raise ValueError(f"must leave {', '.join(taken)} to us")
        return template
