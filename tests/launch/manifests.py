"""What a RayJob may say, as far as fitune's manifests go: fields of its schema and rules of KubeRay's controller."""

import re

JOB_FIELDS = {
    "entrypoint": str, "submissionMode": str, "shutdownAfterJobFinishes": bool, "ttlSecondsAfterFinished": int,
    "backoffLimit": int, "activeDeadlineSeconds": int, "preRunningDeadlineSeconds": int, "rayClusterSpec": dict,
}  # fmt: skip
CLUSTER_FIELDS = {"rayVersion": str, "authOptions": dict, "headGroupSpec": dict, "workerGroupSpecs": list}
GROUP_FIELDS = {
    "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "rayStartParams": dict, "template": dict,
}  # fmt: skip
HEAD_FIELDS = {"rayStartParams": dict, "template": dict}
POD_FIELDS = {
    "restartPolicy": str, "containers": list, "volumes": list, "terminationGracePeriodSeconds": int,
    "automountServiceAccountToken": bool, "serviceAccountName": str, "imagePullSecrets": list, "securityContext": dict,
    "nodeSelector": dict, "tolerations": list, "affinity": dict,
}  # fmt: skip
CONTAINER_FIELDS = {
    "name": str, "image": str, "command": list, "env": list, "envFrom": list, "resources": dict,
    "securityContext": dict, "volumeMounts": list, "lifecycle": dict,
}  # fmt: skip
_QUANTITY = re.compile(r"[0-9]+(Ki|Mi|Gi|Ti|m)?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def unknown(body, fields, where):
    for key, value in body.items():
        if key not in fields:
            yield f"{where}.{key} is no field"
        elif not isinstance(value, fields[key]) or (fields[key] is int and isinstance(value, bool)):
            yield f"{where}.{key} is {value!r}, no {fields[key].__name__}"


def wrong_with_pod(pod, where):
    """Fields of a pod, and rules of the API server: requests of GPUs equal limits, every mount has its volume."""
    yield from unknown(pod, POD_FIELDS, where)
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    if not pod.get("containers"):
        yield f"{where}: no container"
    for container in pod.get("containers", []):
        yield from unknown(container, CONTAINER_FIELDS, f"{where}.{container.get('name')}")
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes or not mount["mountPath"].startswith("/"):
                yield f"{where}: mount {mount} has no volume"
        for variable in container.get("env", []):
            if set(variable) != {"name", "value"} or not isinstance(variable["value"], str):
                yield f"{where}: {variable} is no variable"
        for source in container.get("envFrom", []):
            if set(source) != {"secretRef"}:
                yield f"{where}: {source} is no reference"
        requests, limits = (container["resources"].get(kind, {}) for kind in ("requests", "limits"))
        for name, value in [*requests.items(), *limits.items()]:
            if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
                yield f"{where}: {name} = {value!r} is no quantity"
        for name in {*requests, *limits} - {"cpu", "memory", "ephemeral-storage"}:
            if requests.get(name) != limits.get(name):
                yield f"{where}: {name}: requests and limits of a device differ"


def wrong_with(job):
    """All that the API server's schema or KubeRay's controller would refuse in a RayJob."""
    return list(_wrong_with(job))


def _wrong_with(job):
    if (job.get("apiVersion"), job.get("kind")) != ("ray.io/v1", "RayJob"):
        yield "no RayJob"
    metadata, spec = job["metadata"], job["spec"]
    name = metadata["name"]
    if len(name) > 47 or not _DNS_1035.fullmatch(name):
        yield f"name {name!r}: DNS-1035, at most 47 characters, because names of services are made of it"
    labels = metadata.get("labels", {})
    for key, value in labels.items():
        if len(value) > 63 or not re.fullmatch(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", value):
            yield f"label {key} = {value!r}"
    yield from unknown(spec, JOB_FIELDS, "spec")
    if "kueue.x-k8s.io/queue-name" in labels and spec.get("shutdownAfterJobFinishes") is not True:
        yield "Kueue counts the quota of a cluster until it is gone: shutdownAfterJobFinishes"
    if spec.get("submissionMode") not in (None, "K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"):
        yield f"submissionMode {spec['submissionMode']}"
    if spec.get("backoffLimit", 0) < 0 or spec.get("ttlSecondsAfterFinished", 0) < 0:
        yield "a negative number"
    if spec.get("activeDeadlineSeconds", 1) < 1 or spec.get("preRunningDeadlineSeconds", 1) < 1:
        yield "a deadline that is over"
    cluster = spec.get("rayClusterSpec", {})
    yield from unknown(cluster, CLUSTER_FIELDS, "rayClusterSpec")
    version = [int(part) for part in cluster["rayVersion"].split(".")[:2]]
    if cluster.get("authOptions", {}).get("mode") == "token" and version < [2, 52]:
        yield "token authentication since Ray 2.52"
    yield from _wrong_with_group(cluster["headGroupSpec"], HEAD_FIELDS, "head")
    for group in cluster["workerGroupSpecs"]:
        yield from _wrong_with_group(group, GROUP_FIELDS, "workers")
        low, high = group.get("minReplicas"), group.get("maxReplicas")
        if low is None or high is None or not low <= group["replicas"] <= high:
            yield f"replicas {low} ≤ {group['replicas']} ≤ {high}"


def _wrong_with_group(group, fields, where):
    yield from unknown(group, fields, where)
    for key, value in group["rayStartParams"].items():
        if not isinstance(value, str):
            yield f"{where}: ray start --{key}={value!r} is no text"
    yield from wrong_with_pod(group["template"]["spec"], where)
