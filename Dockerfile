# gristmill as a service or as a sidecar: `docker run IMAGE serve --help`. Meant to run with a read-only root:
#   docker run --read-only --shm-size 8g -p 127.0.0.1:50051:50051 -p 127.0.0.1:8080:8080 -e GRISTMILL_INSECURE=true IMAGE
# For amd64 and arm64. A release gives BASE with the digest that its tag has then, and the arguments below.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY deploy/requirements.txt deploy/build-requirements.txt deploy/slim.sh deploy/
# Wheels alone, whose hashes are known: nothing is compiled, here or in the result.
ARG PIP_OPTIONS="--no-cache-dir --disable-pip-version-check"
RUN python -m venv /opt/gristmill && python -m venv /opt/build \
    && /opt/gristmill/bin/pip install ${PIP_OPTIONS} --no-compile --only-binary :all: --require-hashes -r deploy/requirements.txt \
    && /opt/build/bin/pip install ${PIP_OPTIONS} --only-binary :all: --require-hashes -r deploy/build-requirements.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY clients/python clients/python
COPY recorder recorder
COPY service service
# Nobody may write to it, so that nothing is compiled later either: a start takes a second longer, and the image a third less.
RUN /opt/build/bin/pip wheel ${PIP_OPTIONS} --no-deps --no-build-isolation --wheel-dir /wheels . \
    && /opt/gristmill/bin/pip install ${PIP_OPTIONS} --no-compile --no-deps /wheels/gristmill-*.whl \
    && /opt/gristmill/bin/pip check \
    && /opt/gristmill/bin/pip uninstall --yes pip setuptools \
    && deploy/slim.sh /opt/gristmill

FROM ${BASE}
ARG BASE
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
# Where the repository is served.
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="gristmill" \
      org.opencontainers.image.description="Turns the rollouts of LLM reinforcement learning into train-ready shards." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.url="${SOURCE}" \
      org.opencontainers.image.documentation="${SOURCE}/tree/v${VERSION}/docs" \
      org.opencontainers.image.base.name="${BASE}"
COPY --from=build /opt/gristmill /opt/gristmill
COPY LICENSE /licenses/LICENSE
# A volume that is mounted here is the user's from the start.
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/gristmill
# It listens beyond its container, for which it needs TLS and tokens, or GRISTMILL_INSECURE=true at `docker run`.
ENV PATH=/opt/gristmill/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    GRISTMILL_GRPC_ADDRESS=0.0.0.0:50051 GRISTMILL_HTTP_ADDRESS=0.0.0.0:8080 GRISTMILL_LOG_FORMAT=json
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
EXPOSE 50051 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=6 \
    CMD ["python", "-c", "import os, ssl, urllib.request as r; tls = 'GRISTMILL_TLS_CERT_FILE' in os.environ; r.urlopen(('https' if tls else 'http') + '://127.0.0.1:' + os.environ['GRISTMILL_HTTP_ADDRESS'].rpartition(':')[2] + '/healthz', timeout=4, context=ssl._create_unverified_context() if tls else None)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["gristmill"]
CMD ["serve"]
