"""What the API server or KubeRay's controller would refuse in a manifest that is filled from a template. Names and
types of fields are the templates'; the two examples, which were held against KubeRay's schema, are their goldens."""

import re

_QUANTITY = re.compile(r"[0-9]+(Ki|Mi|Gi|Ti|m)?")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")


def wrong_with(job):
    """All that is wrong with a RayJob."""
    name, cluster = job["metadata"]["name"], job["spec"]["rayClusterSpec"]
    wrong = []
    if len(name) > 47 or not _DNS_1035.fullmatch(name):
        wrong.append(f"name {name!r}: DNS-1035, at most 47 characters, as names of services are made of it")
    for value in job["metadata"]["labels"].values():
        if len(value) > 63 or not _LABEL.fullmatch(value):
            wrong.append(f"label {value!r}")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        words = {key: value for key, value in group["rayStartParams"].items() if not isinstance(value, str)}
        wrong += [f"ray start --{key}={value!r} is no text" for key, value in words.items()]
        wrong += wrong_with_pod(group["template"]["spec"])
    return wrong


def wrong_with_pod(pod):
    """Every mount has its volume, variables are texts, and requests of devices equal their limits."""
    [container] = pod["containers"]
    wrong = [f"{each} is no variable" for each in container["env"] if not isinstance(each["value"], str)]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        if mount["name"] not in volumes or not mount["mountPath"].startswith("/"):
            wrong.append(f"mount {mount} has no volume")
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    for name, value in [*requests.items(), *limits.items()]:
        if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
            wrong.append(f"{name} = {value!r} is no quantity")
    for name in {*requests, *limits} - {"cpu", "memory", "ephemeral-storage"}:
        if requests.get(name) != limits.get(name):
            wrong.append(f"{name}: requests and limits of a device differ")
    return wrong
