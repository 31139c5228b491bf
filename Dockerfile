# fitune with everything a GPU node needs, for `fitune launch --on kuberay` and `--on kubernetes`.
#   docker build -t REGISTRY/fitune:0.1.0 .
# PyPI's torch for Linux brings the CUDA libraries; the node needs NVIDIA's driver and container toolkit.
FROM python:3.11-slim-bookworm

# DeepSpeed builds its optimizer for the host when it is first used: a compiler and ninja. wget: KubeRay's health checks.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ ninja-build wget \
 && rm -rf /var/lib/apt/lists/*

# No virtual environment: KubeRay starts Ray from a login shell, whose PATH is the system's own.
WORKDIR /opt/fitune
COPY pyproject.toml constraints.txt README.md LICENSE ./

# The libraries are a layer of their own: a change of fitune's sources does not install them again. Of Ray, `default` is
# what takes jobs.
RUN python -m pip install --no-cache-dir -c constraints.txt torch \
 && mkdir -p src/fitune && touch src/fitune/__init__.py \
 && python -m pip install --no-cache-dir -c constraints.txt '.[train,plots,track,metrics,quant,deepspeed,remote,ray]' 'ray[default]'

COPY src src
RUN python -m pip install --no-cache-dir --no-deps --force-reinstall .

# Pods run as this user, and the claim belongs to its group (fsGroup).
RUN useradd --uid 1000 --create-home fitune && mkdir /cache && chown fitune:fitune /cache
USER fitune
WORKDIR /home/fitune
CMD ["fitune", "--help"]
